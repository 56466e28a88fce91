# SPDX-License-Identifier: Apache-2.0
"""What /proc/PID tells of a process whose memory is to be placed.

Follows Documentation/filesystems/proc.rst; mempolicies are printed by mpol_to_str() in
mm/mempolicy.c. A process that has gone, or goes while it is read, is None. Samples::

    stat        4711 (redis-server) S 1 4711 ... 4194560 (flags) ... 117615 (start, in ticks)
    status      Tgid:	4711
                Uid:	104	104	104	104 (real, effective, saved, file system)
                VmLck:	       0 kB
                Mems_allowed_list:	0-1
    cgroup      0::/system.slice/redis-server.service
    maps        7f239fb34000-7f239fb36000 rw-p 00031000 fe:00 338944    /usr/lib/ld.so
                ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
    smaps       7f239fb34000-7f239fb36000 rw-p 00031000 fe:00 338944    /usr/lib/ld.so
                VmFlags: rd wr mr mw me lo ac sd
    numa_maps   7f0b3c000000 bind:0 anon=16384 dirty=16384 N0=16384 kernelpagesize_kB=4
                7f0b40000000 weighted interleave:0-1 anon=2 dirty=2 N0=1 N1=1 kernelpagesize_kB=4
                7f0b44000000 prefer (many)=static:0,2 anon=1 dirty=1 N0=1 kernelpagesize_kB=4
                7f0b48000000 default file=/usr/bin/cat mapped=5 N0=5 kernelpagesize_kB=4
"""

import os
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.kernel import text
from tierd.model import PAGE_BYTES, NodeId, Pid

RANGE = np.dtype([("start", "u8"), ("end", "u8")])
"""Addresses of a process. Arrays of it are sorted and disjoint, and adjoining ranges joined."""

_STATUS_BYTES = 64 << 10
_MAPS_BYTES = 1 << 30
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, include/linux/sched.h
_DEAD = frozenset("ZXx")
_FIRST_NAMESPACE = f"pid:[{0xEFFF_FFFC}]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_STATUS = {
    "Tgid": re.compile(r"^Tgid:\s+(\d+)$", re.MULTILINE),
    "Uid": re.compile(r"^Uid:\s+(\d+)\s", re.MULTILINE),
    "VmLck": re.compile(r"^VmLck:\s+(\d+) kB$", re.MULTILINE),
    "Mems_allowed_list": re.compile(r"^Mems_allowed_list:\s*([\d,-]+)$", re.MULTILINE),
}
_MAPPING = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) [-r][-w][-x][ps] ")
_KERNELS_OWN = (b"[vsyscall]", b"[vvar]", b"[vvar_vclock]", b"[vdso]", b"[sigpage]", b"[vectors]")
_POLICY = re.compile(
    rb"([0-9a-f]+) (prefer \(many\)|weighted interleave|\w+)(?:=[\w|]+)?(?::([\d,-]+))?(?: |$)"
)
_RESTRICTING = frozenset({b"bind", b"interleave", b"weighted interleave", b"prefer (many)"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process.

    `start_ticks` since boot tells it from a later one of the same pid. `leader` is another pid
    where this one is of a thread. `user_id` is the real one, `cgroup` that of cgroup v2,
    `allowed_nodes` the cpuset's.
    """

    pid: Pid
    leader: Pid
    command: str
    start_ticks: int
    resident_bytes: int
    is_kernel_thread: bool
    user_id: int | None
    cgroup: str | None
    allowed_nodes: tuple[NodeId, ...] | None
    locked_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundRange:
    """Addresses whose memory the process wants on these nodes."""

    start: int
    end: int
    nodes: tuple[NodeId, ...]


def read_pids(root: Path = Path("/")) -> tuple[Pid, ...]:
    """Returns every process, kernel threads too, in ascending order."""
    with os.scandir(root / "proc") as entries:
        return tuple(sorted(Pid(int(e.name)) for e in entries if e.name.isdecimal()))


def read_command(pid: Pid, root: Path = Path("/")) -> str | None:
    """Returns the name in comm, which execve(2) sets and the process may change."""
    content = text.read_bytes(f"{root}/proc/{pid}/comm", text.ATTRIBUTE_BYTES)
    return None if content is None else content.decode(errors="replace").removesuffix("\n")


def read_user_id(pid: Pid, root: Path = Path("/")) -> int | None:
    """Returns the real user id; None without the process."""
    match = _STATUS["Uid"].search(text.read(_folder(pid, root) / "status", _STATUS_BYTES) or "")
    return None if match is None else int(match[1])


def read_cgroup(pid: Pid, root: Path = Path("/")) -> str | None:
    """Returns the path in cgroup v2's hierarchy; None without one or without the process."""
    content = text.read(_folder(pid, root) / "cgroup", _STATUS_BYTES) or ""
    paths = (line.removeprefix("0::") for line in content.split("\n") if line.startswith("0::"))
    return next(paths, None)


def has_other_numbers(root: Path = Path("/")) -> bool:
    """Tells whether pids here are not the kernel's own, which are those of the first namespace."""
    found = text.link_name(root / "proc/self/ns/pid")
    return found is not None and found != _FIRST_NAMESPACE


def read_leader(thread: int, root: Path = Path("/")) -> Pid | None:
    """Returns the process that a thread is of; None where it has gone."""
    match = _STATUS["Tgid"].search(text.read(root / f"proc/{thread}/status", _STATUS_BYTES) or "")
    return None if match is None else Pid(int(match[1]))


def read_process(pid: Pid, root: Path = Path("/")) -> Process | None:
    """Reads a process; None where there is none, or only a zombie, which has no memory.

    Raises:
        UnexpectedContent: /proc/PID/stat or status are not as documented.
    """
    folder = _folder(pid, root)
    stat = _read_stat(folder / "stat")
    status = text.read(folder / "status", _STATUS_BYTES)
    command = read_command(pid, root)
    if stat is None or status is None or command is None:
        return None
    found = {name: pattern.search(status) for name, pattern in _STATUS.items()}
    leader, user, locked, allowed = (
        None if match is None else match[1] for match in found.values()
    )
    return Process(
        pid=pid,
        leader=Pid(int(leader or pid)),
        command=command,
        start_ticks=stat.start_ticks,
        resident_bytes=stat.resident_pages * PAGE_BYTES,
        is_kernel_thread=bool(stat.flags & _KERNEL_THREAD),
        user_id=None if user is None else int(user),
        cgroup=read_cgroup(pid, root),
        allowed_nodes=_node_ids(folder / "status", allowed) if allowed else None,
        locked_bytes=int(locked or 0) << 10,
    )


def read_resident_bytes(pid: Pid, root: Path = Path("/")) -> int | None:
    """Returns how much memory a process has; None without it.

    Raises:
        UnexpectedContent: /proc/PID/stat is not as documented.
    """
    stat = _read_stat(_folder(pid, root) / "stat")
    return None if stat is None else stat.resident_pages * PAGE_BYTES


def is_alive(process: Process, root: Path = Path("/")) -> bool:
    """Tells whether the process lives still, and its pid was not given to another."""
    stat = _read_stat(_folder(process.pid, root) / "stat")
    return stat is not None and stat.start_ticks == process.start_ticks


def read_mapped(pid: Pid, root: Path = Path("/")) -> NDArray[np.void] | None:
    """Reads the mapped addresses (dtype RANGE), less what the kernel maps itself (vdso and such).

    Raises:
        UnexpectedContent: /proc/PID/maps is not as documented.
        PermissionError: without PTRACE_MODE_READ on the process.
    """
    path = _folder(pid, root) / "maps"
    mappings = [
        (*_parse_mapping(path, line), not line.rstrip().endswith(_KERNELS_OWN))
        for line in text.lines(path, _MAPS_BYTES)
    ]
    if not mappings:
        return None
    return _join((start, end) for start, end, of_process in mappings if of_process)


def read_named(
    pid: Pid, names: Container[str], root: Path = Path("/")
) -> list[tuple[int, int, str]]:
    """Reads the mappings of these names: start, end and name, in ascending order.

    A name is what stands last in /proc/PID/maps: the path of a mapped file, [heap], [stack], or
    [anon:...] as prctl(2) sets it (PR_SET_VMA_ANON_NAME).

    Raises:
        UnexpectedContent: /proc/PID/maps is not as documented.
        PermissionError: without PTRACE_MODE_READ on the process.
    """
    path = _folder(pid, root) / "maps"
    lines = ((line, _mapping_name(line)) for line in text.lines(path, _MAPS_BYTES))
    return [(*_parse_mapping(path, line), name) for line, name in lines if name in names]


def read_locked(process: Process, root: Path = Path("/")) -> NDArray[np.void] | None:
    """Reads the addresses locked by mlock(2) (dtype RANGE): VmFlags `lo`, also of locks on fault.

    smaps walks the whole page table, so it is read only where VmLck says that there are any.
    """
    if not process.locked_bytes:
        return np.empty(0, RANGE)
    path = _folder(process.pid, root) / "smaps"
    lines = text.lines(path, _MAPS_BYTES)
    ranges = list(_locked_ranges(path, lines))
    return _join(ranges) if ranges or is_alive(process, root) else None


def read_policies(pid: Pid, root: Path = Path("/")) -> tuple[BoundRange, ...] | None:
    """Reads where mbind(2) or set_mempolicy(2) restrict the process's memory to nodes.

    bind, interleave, weighted interleave and preferred-many name the nodes that the program chose
    with care. `default` and `local` name none, and `prefer:N` says where to start: the kernel
    itself takes other nodes as soon as N is full, so moving such memory breaks no promise. Of
    the policies of threads only that of the first is visible.

    numa_maps walks the whole page table (some 10 ms a GiB): not for every round. It gives no ends,
    so a range goes on to the next mapping, over addresses that are not mapped.

    Raises:
        UnexpectedContent: /proc/PID/numa_maps is not as documented.
        PermissionError: without PTRACE_MODE_READ on the process.
    """
    path = _folder(pid, root) / "numa_maps"
    starts = [_parse_policy(path, line) for line in text.lines(path, _MAPS_BYTES)]
    if not starts:
        return None
    ends = [start for start, _ in starts[1:]] + [(1 << 64) - 1]
    return tuple(
        BoundRange(start=start, end=end, nodes=nodes)
        for (start, nodes), end in zip(starts, ends, strict=True)
        if nodes is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stat:
    flags: int
    start_ticks: int
    resident_pages: int


def _folder(pid: Pid, root: Path) -> Path:
    return root / "proc" / str(pid)


def _read_stat(path: Path) -> _Stat | None:
    content = text.read(path)
    if content is None:
        return None
    fields = content.rpartition(")")[2].split()  # a command may hold blanks and parentheses
    try:
        stat = _Stat(
            flags=int(fields[6]), start_ticks=int(fields[19]), resident_pages=int(fields[21])
        )
    except (ValueError, IndexError):
        raise text.UnexpectedContent(path, content, "the state of a process") from None
    return None if fields[0] in _DEAD else stat


def _node_ids(path: Path, content: str) -> tuple[NodeId, ...]:
    try:
        return tuple(map(NodeId, text.parse_ids(content)))
    except ValueError:
        raise text.UnexpectedContent(path, content, "a list of nodes such as 0-3,5") from None


def _parse_mapping(path: Path, line: bytes) -> tuple[int, int]:
    match = _MAPPING.match(line)
    if match is None:
        raise text.UnexpectedContent(path, line.decode(errors="replace"), "a mapping")
    return int(match[1], 16), int(match[2], 16)


def _mapping_name(line: bytes) -> str:
    """Returns what a mapping is of, "" for nothing that has a name."""
    fields = line.rstrip(b"\n").split(None, 5)
    return os.fsdecode(fields[5]) if len(fields) > 5 else ""


def _locked_ranges(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    mapping = (0, 0)
    for line in lines:
        if line.startswith(b"VmFlags:"):
            if b"lo" in line.split():
                yield mapping
        elif _MAPPING.match(line):
            mapping = _parse_mapping(path, line)


def _parse_policy(path: Path, line: bytes) -> tuple[int, tuple[NodeId, ...] | None]:
    match = _POLICY.match(line.rstrip())
    if match is None:
        raise text.UnexpectedContent(path, line.decode(errors="replace"), "a mempolicy")
    start, mode, nodes = match.groups()
    if mode not in _RESTRICTING:
        return int(start, 16), None
    return int(start, 16), _node_ids(path, (nodes or b"").decode())


def _join(ranges: Iterable[tuple[int, int]]) -> NDArray[np.void]:
    """Joins adjoining ranges of ascending addresses."""
    table = np.array(list(ranges), np.uint64).reshape(-1, 2)
    first = np.ones(len(table), bool)
    first[1:] = table[1:, 0] != table[:-1, 1]
    joined = np.empty(int(first.sum()), RANGE)
    joined["start"] = table[first, 0]
    joined["end"] = table[np.roll(first, -1), 1]
    return joined
