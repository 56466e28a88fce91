# SPDX-License-Identifier: Apache-2.0
"""Writes what discovery reads from /sys and /proc as JSON; runs in a guest, as root.

    {"files": {"sys/devices/system/node/online": "0-1\\n", ...},
     "links": {"sys/bus/cxl/devices/mem0": "../../../devices/pci0000:0c/.../mem0", ...},
     "folders": ["sys/kernel/mm/damon/admin/kdamonds", ...]}

`folders` has those that would be empty otherwise. tests/unit/trees.py makes a tree of it again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WHOLE = (
    "/sys/devices/system/memory",
    "/sys/devices/system/node",
    "/sys/devices/virtual/memory_tiering",
    "/sys/kernel/mm/damon",
    "/sys/kernel/mm/numa",
    "/sys/module/damon_stat/parameters",
)
BUSES = ("cxl", "dax", "nd")
FILES = (
    "/proc/iomem",
    "/proc/meminfo",
    "/proc/sys/kernel/numa_balancing",
    "/proc/sys/kernel/osrelease",
    "/proc/vmstat",
    "/proc/zoneinfo",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/cpu/possible",
    "/sys/kernel/mm/lru_gen/enabled",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/tracing/events/damon/damon_aggregated/format",
)
PCI_FILES = ("class", "device", "numa_node", "vendor")
LINK_FILE = "current_link_speed"
LEFT_OUT = {"power", "uevent"}
"""Entries that every device has and discovery doesn't read."""


@dataclass(slots=True)
class Capture:
    """What has been captured so far, by path."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Adds a file, a link, or a folder with all that is in it."""
        name = str(path).lstrip("/")
        if path.is_symlink():
            self.links[name] = str(path.readlink())
        elif path.is_dir():
            self._add_folder(path, name)
        elif path.exists():
            self._add_file(path, name)

    def _add_folder(self, path: Path, name: str) -> None:
        entries = [entry for entry in sorted(path.iterdir()) if entry.name not in LEFT_OUT]
        if not entries:
            self.folders.append(name)
        for entry in entries:
            self.add(entry)

    def _add_file(self, path: Path, name: str) -> None:
        try:
            self.files[name] = path.read_text()
        except (OSError, UnicodeDecodeError):
            # Write-only, not applicable to this device, or binary.
            return


def main() -> None:
    """Captures the machine that this runs on."""
    capture = Capture()
    for path in (*WHOLE, *FILES):
        capture.add(Path(path))
    for bus in BUSES:
        _add_bus(capture, Path("/sys/bus") / bus)
    json.dump(
        {"files": capture.files, "links": capture.links, "folders": capture.folders},
        sys.stdout,
        indent=0,
        sort_keys=True,
    )


def _add_bus(capture: Capture, bus: Path) -> None:
    """Adds a bus's devices where they really are, and which driver each has."""
    if not bus.is_dir():
        return
    capture.add(bus / "devices")
    for driver in sorted((bus / "drivers").iterdir()):
        for link in sorted(driver.iterdir()):
            if link.is_symlink():
                capture.add(link)
    for device in _outermost(bus / "devices"):
        capture.add(device)
        for name in PCI_FILES:
            capture.add(device.parent / name)
        for above in device.parents:
            capture.add(above / LINK_FILE)


def _outermost(devices: Path) -> Iterator[Path]:
    """The devices that are not within another one of the same bus."""
    real = sorted(device.resolve() for device in devices.iterdir())
    for device in real:
        if not any(device.is_relative_to(other) for other in real if other != device):
            yield device


if __name__ == "__main__":
    main()
