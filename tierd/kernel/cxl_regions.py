# SPDX-License-Identifier: Apache-2.0
"""Taking a CXL region apart, in the only order that is safe.

Follows drivers/cxl/core/region.c, hdm.c and drivers/dax/kmem.c, as of Linux 6.12 and 7.2::

    memory210/state            offline     every block of it
    drivers/kmem/unbind        dax0.0
    drivers/cxl_region/unbind  region0
    region0/commit             0
    region0/target0            (a newline)
    decoder2.0/dpa_size        0
    decoder0.0/delete_region   region0

kmem lets itself be unbound with blocks online, whereupon their memory "cannot be hotremoved until
the next reboot"; and the kernel would even then delete the region under it. So each block is looked
at right before. The mode of an endpoint's decoder stays `ram`: there is no way back to `none`, and
the next user sets it anew.
"""

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from tierd.errors import Conflict, TierdError
from tierd.kernel.blocks import MEMORY, read_blocks
from tierd.kernel.cxl import DEVICES, REGION_DRIVER, read_decoders, read_regions
from tierd.kernel.dax import KMEM, read_dax_devices
from tierd.kernel.tunable import Files
from tierd.model import Backing, CxlRegion, DaxDevice, MemoryBlock

SETTLE_S = 5.0
"""Drivers that may be being probed asynchronously are waited for so long."""

_LOOK_S = 0.1
_NO_TARGET = "\n"
_OFFLINE = "offline"


class Regions:
    """The regions of the machine whose /sys is below `root`."""

    def __init__(self, root: Path, files: Files) -> None:
        self._root, self._files = root, files

    def folder(self, name: str) -> int | None:
        """Returns what tells a region from a later one of that name; None where there is none."""
        try:
            return (self._root / DEVICES / name).stat().st_ino
        except FileNotFoundError:
            return None

    def find(self, name: str) -> CxlRegion | None:
        """Returns a region as it is now."""
        return next((region for region in read_regions(self._root) if region.name == name), None)

    def is_empty(self, name: str) -> bool:
        """Tells whether nothing has been set of a region yet."""
        region = self.find(name)
        return region is not None and not (
            region.interleave_ways or region.size_bytes or region.decoders or region.committed
        )

    def is_whole(self, name: str, policy: str) -> bool:
        """Tells whether a region's memory is all there, as auto_online_blocks had it come."""
        return self.find(name) is not None and self.missing(name, policy) is None

    def missing(self, name: str, policy: str) -> str | None:
        """Tells what a region lacks to be whole, None where it lacks nothing.

        Args:
            name: the region's.
            policy: what auto_online_blocks held when its memory came.
        """
        region = self.find(name)
        if region is None:
            return f"{name} is gone"
        if not region.committed or region.driver is None:
            return f"{name} is not in use by its driver"
        devices = self._dax_devices(name)
        if not devices:
            return f"{name} has no dax device"
        for dax in devices:
            if dax.driver != "kmem":
                return f"{dax.name} has {dax.driver or 'no driver'}, not kmem"
        blocks = self._blocks(region)
        if not blocks:
            return f"{name} has no blocks of memory"
        wrong = next((block for block in blocks if not _is_as(block, policy)), None)
        if wrong is None:
            return None
        return f"memory{wrong.number} is {wrong.state} in {' or '.join(wrong.zones) or 'no zone'}"

    def unplug(self, name: str, *, is_settled: bool = False) -> None:
        """Takes a region out of use: its memory, its addresses, its devices.

        Args:
            name: the region's.
            is_settled: whether its memory is known to have come, and so cannot be coming still.

        Raises:
            TierdError: its memory is in use, and it stays as it is.
            OSError: the kernel refused something.
        """
        region = self.find(name)
        if region is None:
            return
        if not is_settled:
            self._settle(region)
        self._take_offline(region)
        self.unbind_kmem(name)
        if region.driver is not None:
            self._write(REGION_DRIVER / "unbind", name)
        if region.committed:
            self._write(DEVICES / name / "commit", "0")
        for position in range(region.interleave_ways):
            self._clear_target(name, position)

    def unbind_kmem(self, name: str) -> None:
        """Has the blocks of a region's memory gone, all of which are offline.

        Raises:
            TierdError: one is not, and it stays as it is.
            OSError: the kernel refused it.
        """
        region = self.find(name)
        if region is None:
            return
        for dax in self._dax_devices(name):
            self._unbind_kmem(dax, region)

    def is_plugged(self, name: str, kmem: Collection[str], online: Mapping[int, str]) -> bool:
        """Tells whether a region's memory is as plug() would have it."""
        region = self.find(name)
        if region is None:
            return False
        blocks = {block.number: block for block in self._blocks(region)}
        return all(
            dax.driver == "kmem" for dax in self._dax_devices(name) if dax.name in kmem
        ) and all(
            number in blocks and _is_as(blocks[number], policy) for number, policy in online.items()
        )

    def plug(self, name: str, kmem: Collection[str], online: Mapping[int, str]) -> None:
        """Takes the memory of a region into use again.

        Args:
            name: the region's, which has its driver still.
            kmem: its dax devices that kmem is to have.
            online: what each of its blocks is to be brought online by, as auto_online_blocks
                spells it.

        Raises:
            TierdError: it is not as before then.
            OSError: the kernel refused something.
        """
        for dax in self._dax_devices(name):
            if dax.name in kmem and dax.driver is None:
                self._write(KMEM / "bind", dax.name)
        region = self.find(name)
        for block in () if region is None else self._blocks(region):
            policy = online.get(block.number)
            if policy is None or _is_as(block, policy):
                continue
            state = MEMORY / f"memory{block.number}" / "state"
            if block.state != _OFFLINE:
                self._write(state, _OFFLINE)
            self._write(state, policy)
        if not self.is_plugged(name, kmem, online):
            raise TierdError(
                f"the memory of {name} is not online as it was",
                hint="dmesg tells why; tierctl cxl list shows it, and tries again",
            )

    def release(self, decoder: str, size_bytes: int) -> bool:
        """Gives back so much capacity of a device; tells whether its decoder had it, for no region.

        Raises:
            OSError: the kernel refused it.
        """
        found = (d for d in read_decoders(self._root) if d.name == decoder)
        if not any(d.dpa_bytes == size_bytes and d.region is None for d in found):
            return False
        self._write(DEVICES / decoder / "dpa_size", "0")
        return True

    def delete(self, name: str, root_decoder: str) -> None:
        """Deletes a region that is out of use.

        Raises:
            OSError: the kernel refused it.
        """
        self._write(DEVICES / root_decoder / "delete_region", name)

    def _dax_devices(self, region: str) -> list[DaxDevice]:
        return [
            dax
            for dax in read_dax_devices(self._root)
            if dax.backing is Backing.CXL and dax.region == region
        ]

    def _blocks(self, region: CxlRegion) -> tuple[MemoryBlock, ...]:
        if region.start is None or not region.size_bytes:
            return ()
        addresses = range(region.start, region.start + region.size_bytes)
        return read_blocks([addresses], self._root)

    def _online(self, region: CxlRegion) -> list[MemoryBlock]:
        return [block for block in self._blocks(region) if block.state != _OFFLINE]

    def _settle(self, region: CxlRegion) -> None:
        """Waits for memory that is still coming: to unbind kmem then would be to lose it."""
        end_s = time.monotonic() + SETTLE_S
        while region.driver is not None and time.monotonic() < end_s:
            devices = self._dax_devices(region.name)
            if any(dax.driver not in (None, "kmem") for dax in devices) or self._blocks(region):
                return
            time.sleep(_LOOK_S)

    def _take_offline(self, region: CxlRegion) -> None:
        """Writes to every block: the kernel lets that wait for memory that is being added."""
        refused: OSError | None = None
        for block in reversed(self._blocks(region)):
            try:
                self._write(MEMORY / f"memory{block.number}" / "state", _OFFLINE)
            except OSError as error:
                refused = error
        self._require_offline(region, refused)

    def _require_offline(self, region: CxlRegion, cause: OSError | None = None) -> None:
        if online := self._online(region):
            raise Conflict(
                f"{len(online)} memory blocks of {region.name} are in use and stay online, so it "
                "stays too",
                hint="end what uses their memory, or have it moved (tierctl drain), and try again",
            ) from cause

    def _unbind_kmem(self, dax: DaxDevice, region: CxlRegion) -> None:
        if dax.driver is None:
            return
        if dax.driver != "kmem":
            raise Conflict(
                f"{dax.name} of {region.name} has the driver {dax.driver} now",
                hint=f"end what uses it: daxctl disable-device {dax.name}",
            )
        self._require_offline(region)
        self._write(KMEM / "unbind", dax.name)
        if self._blocks(region):
            raise TierdError(
                f"the memory of {region.name} came online while it was removed, and stays until "
                "the next boot",
                hint="see what brings memory online (udev's rules), and boot again",
            )

    def _clear_target(self, name: str, position: int) -> None:
        region = self.find(name)
        target = DEVICES / name / f"target{position}"
        if region is not None and self._files.read(self._root / target):
            self._write(target, _NO_TARGET)

    def _write(self, path: Path, value: str) -> None:
        self._files.write(self._root / path, value)


def _is_as(block: MemoryBlock, policy: str) -> bool:
    if policy == _OFFLINE:
        return block.state == _OFFLINE
    is_movable = block.zones == ("Movable",)
    return block.state == "online" and is_movable == (policy == "online_movable")
