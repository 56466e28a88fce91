# SPDX-License-Identifier: Apache-2.0
"""A fake of the sysfs of CXL, dax and memory blocks: a captured tree that answers writes.

What it copies from drivers/cxl/core/{region,hdm,port}.c and drivers/dax/kmem.c is the order that
they want writes in, each errno, and what a write changes elsewhere. Where the kernel would let
memory be lost, it fails the test. All memory is node 1's. The guests' tests hold the real thing.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit import trees
from tierd import journal as journal_module

CXL, DAX = "sys/bus/cxl", "sys/bus/dax"
MEMORY, NODE = "sys/devices/system/memory", "sys/devices/system/node"
ALIGN_BYTES = 256 << 20
NOWHERE = "0xffffffffffffffff"
_POLICIES = ("offline", "online", "online_kernel", "online_movable")
_WAYS = (1, 2, 3, 4, 6, 8, 12, 16)


class Killed(BaseException):
    """Stands for SIGKILL: from then on the process writes nothing at all."""


def killed_at(at: int, work: Callable[[], object]) -> bool:
    """Dies before the n-th write to the machine or a journal; tells whether it got to the end."""
    left = iter(range(at))
    write, append = FakeCxl.write, journal_module._write_synced

    def write_or_die(self: FakeCxl, path: Path, value: str) -> None:
        if next(left, None) is None:
            raise Killed
        write(self, path, value)

    def append_or_die(fd: int, data: bytes) -> None:
        if next(left, None) is None:
            raise Killed
        append(fd, data)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(FakeCxl, "write", write_or_die)
        patch.setattr(journal_module, "_write_synced", append_or_die)
        work()
        return True
    return False


class FakeCxl:
    """tierd.kernel.tunable.Files over an imagined kernel, with the CXL memory of a tree free.

    Args:
        root: where the tree goes.
        tree: its name, of one region.
    """

    def __init__(self, root: Path, tree: str = "cxl-7.2") -> None:
        self.root = trees.unpack(tree, root)
        self.writes: list[tuple[str, str]] = []
        self.refused: dict[str, int] = {}
        """The errno that a write to a path gets, by what it ends with."""
        self.busy: set[int] = set()
        """The memory blocks that cannot be taken offline."""
        self.flushes = True
        """Whether the CPUs' caches can be flushed by address."""
        self.probes = True
        """Whether kmem takes dax devices."""
        self.is_late = False
        """Whether it takes them only when probe() is called."""
        self._pending: list[Path] = []
        self._gone = root.parent / f"{root.name}-gone"
        self._gone.mkdir()
        self._parted = 0
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        self.reboot("boot-1")
        self._take_apart()
        (root / MEMORY / "auto_online_blocks").write_text("online\n")
        self.writes.clear()

    def reboot(self, boot_id: str) -> None:
        (self.root / "proc/sys/kernel/random/boot_id").write_text(boot_id + "\n")

    def device(self, name: str) -> Path:
        return (self.root / CXL / "devices" / name).resolve()

    def footprint(self) -> dict[str, str]:
        """Returns all that there is, but for what has no way back: modes, and the next names."""
        left_out = ("create_ram_region", "create_pmem_region")
        return {
            str(path.relative_to(self.root)): str(path.readlink())
            if path.is_symlink()
            else path.read_text()
            for folder in ("sys/bus", "sys/devices/platform", MEMORY, NODE)
            for path in sorted((self.root / folder).rglob("*"))
            if (path.is_symlink() or path.is_file())
            and path.name not in left_out
            and not (path.name == "mode" and path.parent.name.startswith("decoder"))
        }

    def blocks(self) -> dict[int, str]:
        """Returns the state of each memory block of CXL memory."""
        folders = (self.root / MEMORY).glob("memory*/node1")
        states = (link.parent for link in folders)
        return {
            int(f.name.removeprefix("memory")): (f / "state").read_text().strip() for f in states
        }

    def read(self, path: Path) -> str:
        return path.read_text().strip()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def names(self, path: Path) -> list[str]:
        return [entry.name for entry in path.iterdir()]

    def write_ranges(self, folder: Path, start: int, size: int, count: int) -> None:
        raise NotImplementedError

    def write(self, path: Path, value: str) -> None:
        name = str(path.relative_to(self.root))
        drivers = (f"{CXL}/drivers/cxl_region", f"{DAX}/drivers/kmem")
        is_command = any(name in (f"{d}/bind", f"{d}/unbind") for d in drivers)
        if not (is_command or path.exists() or path.name == "delete_region"):
            raise self._error(errno.ENOENT, name)
        self.writes.append((name, value))
        for end, number in self.refused.items():
            if name.endswith(end):
                raise self._error(number, name)
        what = "target" if re.fullmatch(r"target\d+", path.name) else path.name
        if is_command:
            what = f"{path.parent.name}_{path.name}"
        getattr(self, f"_{what}")(path.resolve(), value)

    def _create_ram_region(self, path: Path, value: str) -> None:
        if self.read(path) != value:
            raise self._error(errno.EBUSY, str(path))
        region = path.parent / value
        region.mkdir()
        empty = {
            "commit": "0",
            "interleave_granularity": "0",
            "interleave_ways": "0",
            "mode": "ram",
            "resource": NOWHERE,
            "size": "0x0",
            "uuid": "",
        }
        for attribute, content in empty.items():
            self._put(region / attribute, content)
        self._link(self.root / CXL / "devices" / value, region)
        names = {p.name for p in (self.root / CXL / "devices").iterdir()}
        names |= {self.read(p) for p in self._roots("create_ram_region") if p.parent != path.parent}
        fresh = next(f"region{n}" for n in range(99) if f"region{n}" not in names)
        for attribute in ("create_ram_region", "create_pmem_region"):
            self._put(path.parent / attribute, fresh)

    def _delete_region(self, path: Path, value: str) -> None:
        region = path.parent / value
        if not region.exists():
            raise self._error(errno.ENODEV, str(path))
        assert not self.blocks(), "memory would lose its addresses"
        assert not (region / "driver").exists(), "the region is in use"
        for target in region.glob("target*"):
            self._detach(target)
        (self.root / CXL / "devices" / value).unlink()
        self._remove(region)

    def _interleave_granularity(self, path: Path, value: str) -> None:
        number, window = int(value), path.parents[1]
        if number not in (256 << power for power in range(7)):
            raise self._error(errno.EINVAL, str(path))
        of_window = self._int(window / "interleave_granularity")
        if self._int(window / "interleave_ways") > 1 and number != of_window:
            raise self._error(errno.EINVAL, str(path))
        self._set_shape(path, value)

    def _interleave_ways(self, path: Path, value: str) -> None:
        ways, of_window = int(value), self._int(path.parents[1] / "interleave_ways")
        if ways not in _WAYS or ways % of_window or (ways // of_window) not in (1, 2, 4, 8, 16):
            raise self._error(errno.EINVAL, str(path))
        self._set_shape(path, value)
        for position in range(ways):
            self._put(path.parent / f"target{position}", "")

    def _set_shape(self, path: Path, value: str) -> None:
        if self._int(path.parent / "size"):
            raise self._error(errno.EBUSY, str(path))
        self._put(path, value)

    def _size(self, path: Path, value: str) -> None:
        region, size = path.parent, int(value)
        if not all(self._int(region / f"interleave_{w}") for w in ("ways", "granularity")):
            raise self._error(errno.ENXIO, str(path))
        if self._int(path):
            raise self._error(errno.EBUSY, str(path))
        if size % (ALIGN_BYTES * self._int(region / "interleave_ways")):
            raise self._error(errno.EINVAL, str(path))
        window = region.parent
        others = [p for p in window.glob("region*/size") if self._int(p)]
        start = max(
            (self._int(p.parent / "resource") + self._int(p) for p in others),
            default=self._int(window / "start"),
        )
        if start + size > self._int(window / "start") + self._int(window / "size"):
            raise self._error(errno.ERANGE, str(path))
        self._put(region / "resource", f"{start:#x}")
        self._put(path, f"{size:#x}")

    def _mode(self, path: Path, value: str) -> None:
        if value not in ("ram", "pmem"):
            raise self._error(errno.EINVAL, str(path))
        if self._int(path.parent / "dpa_size"):
            raise self._error(errno.EBUSY, str(path))
        if not self._int(self._memdev(path.parent) / value / "size"):
            raise self._error(errno.ENXIO, str(path))
        self._put(path, value)

    def _dpa_size(self, path: Path, value: str) -> None:
        decoder, size = path.parent, int(value)
        siblings = sorted(decoder.parent.glob("decoder*.*"), key=lambda p: int(p.suffix[1:]))
        used = [sibling for sibling in siblings if self._int(sibling / "dpa_size")]
        if self.read(decoder / "region") or size % ALIGN_BYTES:
            number = errno.EINVAL if size % ALIGN_BYTES else errno.EBUSY
            raise self._error(number, str(path))
        if decoder in used:
            if decoder != used.pop():
                raise self._error(errno.EBUSY, str(path))
            self._put(decoder / "dpa_resource", NOWHERE)
            self._put(path, "0x0000000000000000")
        if not size:
            return
        if self.read(decoder / "mode") not in ("ram", "pmem"):
            raise self._error(errno.EINVAL, str(path))
        if decoder != siblings[len(used)]:
            raise self._error(errno.EBUSY, str(path))
        start = sum(self._int(sibling / "dpa_size") for sibling in used)
        if start + size > self._int(self._memdev(decoder) / "ram/size"):
            raise self._error(errno.ENOSPC, str(path))
        self._put(decoder / "dpa_resource", f"{start:#x}")
        self._put(path, f"{size:#018x}")

    def _target(self, path: Path, value: str) -> None:
        region, position = path.parent, int(path.name.removeprefix("target"))
        if self._int(region / "commit"):
            raise self._error(errno.EBUSY, str(path))
        if not value.strip():
            self._detach(path)
            return
        decoder = self.device(value)
        if not decoder.exists():
            raise self._error(errno.ENODEV, str(path))
        ways, size = self._int(region / "interleave_ways"), self._int(region / "size")
        targets = self.read(region.parent / "target_list").split(",")
        if self._bridge(decoder) != targets[position % len(targets)] or not size:
            raise self._error(errno.ENXIO, str(path))
        if self.read(path) or self.read(decoder / "region"):
            raise self._error(errno.EBUSY, str(path))
        if self._int(decoder / "dpa_size") * ways != size:
            raise self._error(errno.EINVAL, str(path))
        ports = [p.name for p in decoder.parents if p.name.startswith("port")]
        ours = [switch.parent.name for switch in self._switches(decoder, of=region.name)]
        free = [s for s in self._switches(decoder, of="") if s.parent.name not in ours]
        if len(ours) + len(free) < len(ports):
            raise self._error(errno.EBUSY, str(path))
        self._put(path, value)
        for taken in (decoder, *free):
            self._put(taken / "region", region.name)

    def _detach(self, target: Path) -> None:
        name = self.read(target)
        self._put(target, "")
        if not name:
            return
        decoder = self.device(name)
        self._put(decoder / "region", "")
        for switch in self._switches(decoder, of=target.parent.name):
            below = switch.parent.rglob("endpoint*/decoder*/region")
            if target.parent.name not in map(self.read, below):
                self._put(switch / "region", "")

    def _switches(self, decoder: Path, *, of: str) -> Iterator[Path]:
        """Yields the first decoder with this region of each port above an endpoint's."""
        for port in decoder.parents:
            if port.name.startswith("port"):
                decoders = sorted(port.glob("decoder*.*"))
                yield from [d for d in decoders if self.read(d / "region") == of][:1]

    def _commit(self, path: Path, value: str) -> None:
        region = path.parent
        targets = [self.read(target) for target in region.glob("target*")]
        if value == "1":
            if not targets or not all(targets) or not self.flushes:
                raise self._error(errno.ENXIO, str(path))
        else:
            assert not self.blocks(), "memory would lose its addresses"
        for decoder in targets:
            for attribute, of_region in (("start", "resource"), ("size", "size")):
                content = self.read(region / of_region) if value == "1" else "0x0"
                self._put(self.device(decoder) / attribute, content)
        self._put(path, value)

    def _cxl_region_bind(self, path: Path, value: str) -> None:
        region = self.device(value)
        if not region.exists():
            raise self._error(errno.ENODEV, str(path))
        if not self._int(region / "commit"):
            raise self._error(errno.ENXIO, str(path))
        self._link(region / "driver", self.root / CXL / "drivers/cxl_region")
        name = value.replace("region", "dax") + ".0"
        dax = region / value.replace("region", "dax_region") / name
        dax.mkdir(parents=True)
        size = self._int(region / "size")
        for attribute, content in (
            ("size", str(size)),
            ("target_node", "1"),
            ("resource", self.read(region / "resource")),
        ):
            self._put(dax / attribute, content)
        self._link(self.root / DAX / "devices" / name, dax)
        self._pending = [dax] if self.probes else []
        if not self.is_late:
            self.probe()

    def probe(self) -> None:
        """Has kmem take the dax devices that came."""
        for dax in self._pending:
            self._link(dax / "driver", self.root / DAX / "drivers/kmem")
            start = self._int(dax / "resource")
            self._add_blocks(range(start, start + self._int(dax / "size")))
        self._pending = []

    def _add_blocks(self, addresses: range) -> None:
        block_bytes = int(self.read(self.root / MEMORY / "block_size_bytes"), 16)
        policy = self.read(self.root / MEMORY / "auto_online_blocks")
        zone = "Movable" if policy == "online_movable" else "Normal"
        for number in range(addresses.start // block_bytes, addresses.stop // block_bytes):
            block = self.root / MEMORY / f"memory{number}"
            block.mkdir()
            self._put(block / "state", "offline" if policy == "offline" else "online")
            self._put(block / "valid_zones", "Normal Movable" if policy == "offline" else zone)
            self._link(block / "node1", self.root / NODE / "node1")
            self._link(self.root / NODE / "node1" / block.name, block)
        self._set_nodes()

    def _cxl_region_unbind(self, path: Path, value: str) -> None:
        region = self.device(value)
        if not (region / "driver").is_symlink():
            raise self._error(errno.ENODEV, str(path))
        assert not self.blocks(), "memory would lose its dax device"
        (region / "driver").unlink()
        for dax in region.glob("dax_region*/dax*.0"):
            (self.root / DAX / "devices" / dax.name).unlink()
            (self.root / CXL / "devices" / dax.parent.name).unlink(missing_ok=True)
            self._remove(dax.parent)

    def _kmem_unbind(self, path: Path, value: str) -> None:
        dax = (self.root / DAX / "devices" / value).resolve()
        if not (dax / "driver").is_symlink():
            raise self._error(errno.ENODEV, str(path))
        assert "online" not in self.blocks().values(), "memory could not be removed until a reboot"
        (dax / "driver").unlink()
        for number in self.blocks():
            (self.root / NODE / "node1" / f"memory{number}").unlink()
            self._remove(self.root / MEMORY / f"memory{number}")
        self._set_nodes()

    def _kmem_bind(self, path: Path, value: str) -> None:
        dax = (self.root / DAX / "devices" / value).resolve()
        if not dax.exists() or (dax / "driver").is_symlink():
            raise self._error(errno.ENODEV, str(path))
        self._pending = [dax]
        self.probe()

    def _state(self, path: Path, value: str) -> None:
        if value not in _POLICIES or (value == "offline") == (self.read(path) == "offline"):
            raise self._error(errno.EINVAL, str(path))
        if value == "offline" and int(path.parent.name.removeprefix("memory")) in self.busy:
            raise self._error(errno.EBUSY, str(path))
        zones = {"offline": "Normal Movable", "online_movable": "Movable"}.get(value, "Normal")
        self._put(path, "offline" if value == "offline" else "online")
        self._put(path.parent / "valid_zones", zones)
        self._set_nodes()

    def _auto_online_blocks(self, path: Path, value: str) -> None:
        if value not in _POLICIES:
            raise self._error(errno.EINVAL, str(path))
        self._put(path, value)

    def _set_nodes(self) -> None:
        """Has node 1 online while it has memory that is."""
        is_online = "online" in self.blocks().values()
        self._put(self.root / NODE / "online", "0-1" if is_online else "0")
        self._put(self.root / NODE / "node0/distance", "10 20" if is_online else "10")
        self._put(self.root / NODE / "node1/distance", "20 10" if is_online else "20")

    def _take_apart(self) -> None:
        """Frees what the captured machine's region has."""
        (region,) = (p for p in (self.root / CXL / "devices").glob("region*"))
        for number in self.blocks():
            self.write(self.root / MEMORY / f"memory{number}/state", "offline")
        dax = region.name.replace("region", "dax") + ".0"
        self.write(self.root / DAX / "drivers/kmem/unbind", dax)
        self.write(self.root / CXL / "drivers/cxl_region/unbind", region.name)
        self.write(region / "commit", "0")
        decoders = [self.read(target) for target in region.glob("target*")]
        for target in region.glob("target*"):
            self.write(target, "\n")
        for decoder in decoders:
            self.write(self.device(decoder) / "dpa_size", "0")
        self.write(region.resolve().parent / "delete_region", region.name)

    def _roots(self, attribute: str) -> Iterator[Path]:
        return (self.root / CXL / "devices").resolve().glob(f"decoder*/{attribute}")

    def _memdev(self, decoder: Path) -> Path:
        return (decoder.parent / "uport").resolve()

    def _bridge(self, decoder: Path) -> str:
        port = next(p for p in decoder.parents if p.parent.name.startswith("root"))
        above = port.parent.glob("dport*")
        of = (port / "uport").resolve()
        return next(p.name.removeprefix("dport") for p in above if p.resolve() == of)

    def _int(self, path: Path) -> int:
        return int(self.read(path) or "0", 0)

    def _put(self, path: Path, content: str) -> None:
        path.write_text(content + "\n")

    def _link(self, path: Path, to: Path) -> None:
        path.symlink_to(os.path.relpath(to, path.parent.resolve()))

    def _remove(self, folder: Path) -> None:
        """Takes a folder away without giving its inode free, which sysfs never uses again."""
        self._parted += 1
        folder.rename(self._gone / str(self._parted))

    def _error(self, number: int, name: str) -> OSError:
        return OSError(number, os.strerror(number), name)
