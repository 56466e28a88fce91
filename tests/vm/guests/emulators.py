# SPDX-License-Identifier: Apache-2.0
"""QEMU 10 and 11, each unpacked into the cache with the libraries that it was built for.

Started through its own dynamic loader, each runs on any host, whatever C library that has.
"""

from __future__ import annotations

from pathlib import Path

from guests import archive, cache
from guests.archive import Suite
from guests.topology import Emulator

SUITES = {Emulator.SLOW: Suite.TRIXIE, Emulator.FAST: Suite.SID}

LAUNCHER = """\
#!/bin/sh
tree=$(dirname "$(readlink -f "$0")")
libraries=$tree/usr/lib/x86_64-linux-gnu
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" \\
	"$tree/usr/bin/qemu-system-x86_64" \\
	-L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" -L "$tree/usr/lib/ipxe/qemu" "$@"
"""


def fetch(emulator: Emulator) -> Path:
    """The program that starts that QEMU, from the cache or else from the archive."""
    return cache.tree(f"qemu-{emulator}", lambda folder: _build(emulator, folder)) / "qemu"


def fetch_busybox() -> Path:
    """A static busybox, of which virtme-ng makes the initramfs."""
    return cache.tree("busybox", _build_busybox) / "usr/bin/busybox"


def _build(emulator: Emulator, folder: Path) -> str:
    with archive.suite(SUITES[emulator]) as apt:
        packages = apt.download_closure(["qemu-system-x86", "seabios"])
        digest = archive.unpack(packages, folder)
    launcher = folder / "qemu"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    return digest


def _build_busybox(folder: Path) -> str:
    with archive.suite(Suite.TRIXIE) as apt:
        return archive.unpack(apt.download(["busybox-static"]), folder)
