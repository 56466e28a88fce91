# SPDX-License-Identifier: Apache-2.0
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.kernel import process
from tierd.kernel.process import BoundRange
from tierd.kernel.text import UnexpectedContent
from tierd.model import Pid

PID = Pid(42)
STAT = "42 (a) b (c)) {state} 1 42 42 0 -1 {flags} 98 0 0 0 0 0 0 0 20 0 1 0 {start} 31 35 18\n"
STATUS = "Name:\ta b\nTgid:\t{leader}\nVmLck:\t{locked} kB\nMems_allowed_list:\t{nodes}\n"
MAPS = """\
1000-2000 r--p 00000000 fe:00 12                         /usr/bin/cat
2000-5000 rw-p 00000000 00:00 0                          [heap]
7000-8000 ---p 00000000 00:00 0
9000-a000 r--p 00000000 00:00 0                          [vvar]
a000-b000 r-xp 00000000 00:00 0                          [vdso]
b000-c000 rw-s 00000000 00:05 7                          /dev/shm/a [b] (deleted)
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0  [vsyscall]
"""
SMAPS = """\
1000-2000 rw-p 00000000 00:00 0
Size:                  4 kB
VmFlags: rd wr mr mw me ac sd
2000-3000 rw-p 00000000 00:00 0
Size:                  4 kB
VmFlags: rd wr mr mw me lo ac sd
3000-4000 rw-p 00000000 00:00 0                          VmFlags: lo
VmFlags: rd wr lo
5000-6000 rw-p 00000000 00:00 0                          [heap]
VmFlags: rd wr lo
"""
NUMA_MAPS = """\
1000 default file=/usr/bin/cat mapped=5 N0=5 kernelpagesize_kB=4
2000 bind:1 anon=1 dirty=1 N1=1 kernelpagesize_kB=4
3000 prefer:1 anon=1
4000 local
5000 interleave=static:0-1,3 anon=2 N0=1 N1=1
6000 weighted interleave=relative:0,2
7000 prefer (many)=static|relative:2 anon=1
8000 bind=static|balancing:0-1
9000 default heap anon=1
a000 bind:0"""


def write(root: Path, **files: str) -> None:
    folder = root / "proc/42"
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "stat": STAT.format(state="S", flags=4194304, start=117615),
        "status": STATUS.format(leader=42, locked=0, nodes="0-1"),
        "comm": "a) b (c)\n",
        "cgroup": "4:memory:/m\n0::/system.slice/a.service\n",
    }
    for name, content in (contents | files).items():
        (folder / name).write_text(content)


def ranges(array: "np.typing.NDArray[np.void] | None") -> list[tuple[int, int]]:
    assert array is not None
    return [(int(start), int(end)) for start, end in array]


def test_process(tmp_path: Path) -> None:
    write(tmp_path)
    found = process.read_process(PID, tmp_path)
    assert found is not None
    assert (found.pid, found.leader, found.command) == (42, 42, "a) b (c)")
    assert (found.start_ticks, found.is_kernel_thread) == (117615, False)
    assert (found.cgroup, found.allowed_nodes) == ("/system.slice/a.service", (0, 1))
    assert found.locked_bytes == 0


def test_mappings_by_name(tmp_path: Path) -> None:
    anonymous = "c000-d000 rw-p 00000000 00:00 0                          [anon:my cache]\n"
    write(tmp_path, maps=MAPS.replace("7000-8000 ---p", f"{anonymous}7000-8000 ---p"))
    wanted = {"[heap]", "/dev/shm/a [b] (deleted)", "[anon:my cache]", "/usr/bin/ca"}
    assert process.read_named(PID, wanted, tmp_path) == [
        (0x2000, 0x5000, "[heap]"),
        (0xC000, 0xD000, "[anon:my cache]"),
        (0xB000, 0xC000, "/dev/shm/a [b] (deleted)"),
    ]
    assert process.read_named(Pid(43), wanted, tmp_path) == []


def test_kernel_thread_thread_and_old_hierarchies(tmp_path: Path) -> None:
    write(
        tmp_path,
        stat=STAT.format(state="S", flags=0x00208040, start=24),
        status="Name:\tx\nTgid:\t7\n",
        cgroup="4:memory:/m\n",
    )
    found = process.read_process(PID, tmp_path)
    assert found is not None
    assert (found.is_kernel_thread, found.leader) == (True, 7)
    assert (found.cgroup, found.allowed_nodes, found.locked_bytes) == (None, None, 0)


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_zombie_has_gone(tmp_path: Path, state: str) -> None:
    write(tmp_path, stat=STAT.format(state=state, flags=0, start=117615))
    assert process.read_process(PID, tmp_path) is None


def test_a_process_that_has_gone_is_none(tmp_path: Path) -> None:
    write(tmp_path, status=STATUS.format(leader=42, locked=4, nodes="0"))
    found = process.read_process(PID, tmp_path)
    assert found is not None
    for name in ("stat", "status", "comm", "cgroup"):
        (tmp_path / "proc/42" / name).unlink()
    assert process.read_process(PID, tmp_path) is None
    assert process.read_command(PID, tmp_path) is None
    assert process.read_cgroup(PID, tmp_path) is None
    assert process.read_mapped(PID, tmp_path) is None
    assert process.read_policies(PID, tmp_path) is None
    assert process.read_locked(found, tmp_path) is None
    assert not process.is_alive(found, tmp_path)


def test_a_pid_given_to_another_process(tmp_path: Path) -> None:
    write(tmp_path)
    found = process.read_process(PID, tmp_path)
    assert found is not None
    assert process.is_alive(found, tmp_path)
    write(tmp_path, stat=STAT.format(state="S", flags=0, start=117616))
    assert not process.is_alive(found, tmp_path)


def test_pids(tmp_path: Path) -> None:
    for name in ("10", "9", "self", "1", "tty"):
        (tmp_path / "proc" / name).mkdir(parents=True)
    assert process.read_pids(tmp_path) == (1, 9, 10)


def test_mapped_ranges_are_joined_and_lack_the_kernels_own(tmp_path: Path) -> None:
    write(tmp_path, maps=MAPS)
    assert ranges(process.read_mapped(PID, tmp_path)) == [
        (0x1000, 0x5000),
        (0x7000, 0x8000),
        (0xB000, 0xC000),
    ]


def test_no_mappings_at_all_is_a_process_that_exits(tmp_path: Path) -> None:
    write(tmp_path, maps="")
    assert process.read_mapped(PID, tmp_path) is None


def test_locked_ranges(tmp_path: Path) -> None:
    write(tmp_path, status=STATUS.format(leader=42, locked=12, nodes="0"), smaps=SMAPS)
    found = process.read_process(PID, tmp_path)
    assert found is not None
    assert found.locked_bytes == 12 << 10
    assert ranges(process.read_locked(found, tmp_path)) == [(0x2000, 0x4000), (0x5000, 0x6000)]


def test_smaps_is_left_alone_where_nothing_is_locked(tmp_path: Path) -> None:
    write(tmp_path, smaps=SMAPS)
    found = process.read_process(PID, tmp_path)
    assert found is not None
    assert ranges(process.read_locked(found, tmp_path)) == []


def test_policies_that_restrict(tmp_path: Path) -> None:
    write(tmp_path, numa_maps=NUMA_MAPS)
    bound = [
        (0x2000, 0x3000, (1,)),
        (0x5000, 0x6000, (0, 1, 3)),
        (0x6000, 0x7000, (0, 2)),
        (0x7000, 0x8000, (2,)),
        (0x8000, 0x9000, (0, 1)),
        (0xA000, (1 << 64) - 1, (0,)),
    ]
    assert process.read_policies(PID, tmp_path) == tuple(
        BoundRange(start=start, end=end, nodes=nodes)  # type: ignore[arg-type]
        for start, end, nodes in bound
    )


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("stat", "", "the state of a process"),
        ("stat", "42 (a", "the state of a process"),
        ("stat", STAT.format(state="S", flags="many", start=1), "the state of a process"),
        ("status", STATUS.format(leader=42, locked=0, nodes="3-1"), "a list of nodes"),
        ("maps", "1000 2000 rw-p\n", "a mapping"),
        ("smaps", "", None),
        ("numa_maps", "bind:0\n", "a mempolicy"),
        ("numa_maps", "1000 bind:1-\n", "a list of nodes"),
    ],
)
def test_garbled_content(tmp_path: Path, name: str, content: str, wanted: str | None) -> None:
    status = STATUS.format(leader=42, locked=4, nodes="0")
    write(tmp_path, **({"status": status, "maps": MAPS, "smaps": SMAPS} | {name: content}))

    def read() -> None:
        found = process.read_process(PID, tmp_path)
        assert found is not None
        process.read_mapped(PID, tmp_path)
        process.read_policies(PID, tmp_path)
        assert ranges(process.read_locked(found, tmp_path)) == []

    if wanted is None:
        read()
    else:
        with pytest.raises(UnexpectedContent, match=f"proc/42/{name} holds .*{wanted}"):
            read()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=30))
def test_joined_ranges_cover_the_same_addresses(steps: list[tuple[int, int]]) -> None:
    split, at = [], 0
    for gap, length in steps:
        split.append((at + gap, at + gap + length))
        at += gap + length
    joined = ranges(process._join(split))
    assert [a for r in joined for a in range(*r)] == [a for r in split for a in range(*r)]
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(joined))
