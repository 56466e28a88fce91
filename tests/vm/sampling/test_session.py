# SPDX-License-Identifier: Apache-2.0
"""Sessions against the kernel's own DAMON, beside other users of it."""

import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from guests.guest import REPOSITORY
from numpy.typing import NDArray

from tierd.bulk import PIECE, Accesses
from tierd.config import DamonConfig
from tierd.errors import Conflict, TierdError
from tierd.journal import Journal, Slots, Tunable
from tierd.kernel import tracepoint
from tierd.kernel.damon import Admin, ExclusiveUse, Setup, Slot, SlotIndex
from tierd.model import Pid
from tierd.sample import residence
from tierd.sample.reader import RingReader
from tierd.sample.session import Session

T = TypeVar("T")

MIB = 1 << 20
BUFFER_MIB, HOT_AT_MIB, HOT_MIB = 64, 16, 8
SHARE = 99
"""Percent of the accesses. With 90 on a quiet host, an emulated program touched each cold page in
half of DAMON's samples, which then are far apart: all of it was hot."""
CONFIG = DamonConfig(take_over=True, cpu_percent=100.0)
"""An emulated kdamond is some 50 times slower, and the budget is for real ones."""

WITHIN_S = 90
SHOWN = 5
ADMIN = Admin()
STAT = ADMIN.exclusive_switch("damon_stat")
KNOWN_EXCLUSIVE = [
    module for module in ("damon_stat", "damon_reclaim") if ADMIN.exclusive_switch(module).exists()
]


@dataclass(frozen=True, slots=True)
class Workload:
    """A hotset: the addresses of its hot window."""

    pid: Pid
    start: int
    end: int


@pytest.fixture(scope="module")
def workload() -> Iterator[Workload]:
    options = f"--mib {BUFFER_MIB} --node 1 --hot-mib {HOT_MIB} --hot-offset-mib {HOT_AT_MIB}"
    program = str(REPOSITORY / ".out/workloads/hotset")
    command = [program, *options.split(), "--share", f"{SHARE}", "--cpu", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()  # the buffer is filled
            start = buffer_of(process.pid) + HOT_AT_MIB * MIB
            yield Workload(Pid(process.pid), start, start + HOT_MIB * MIB)
        finally:
            process.terminate()


def buffer_of(pid: int) -> int:
    """Returns where the largest mapping begins."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    ranges = [tuple(int(side, 16) for side in line.split()[0].split("-")) for line in maps]
    start, end = max(ranges, key=lambda range_: range_[1] - range_[0])
    assert end - start == BUFFER_MIB * MIB
    return start


@contextmanager
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path) as journal:
        yield journal
        assert journal.changes == {}


@pytest.fixture
def without_damon_stat() -> Iterator[None]:
    """Has nobody hold DAMON for itself, as another's kdamond needs."""
    before = STAT.read_text().strip() if STAT.exists() else None
    if before is not None:
        STAT.write_text("N")
    yield
    if before is not None:
        STAT.write_text(before)


@pytest.fixture
def foreign(without_damon_stat: None) -> Iterator[Slot]:
    """Somebody else's kdamond, the first of three slots."""
    index = SlotIndex(0)
    ADMIN.resize(3)
    with sleeper() as process:
        ADMIN.claim(index, 7_000_000)
        ADMIN.set_up(
            index,
            Setup(
                sample_us=50_000,
                aggregation_us=500_000,
                update_us=7_000_000,
                min_regions=10,
                max_regions=100,
            ),
        )
        ADMIN.set_target(index, Pid(process.pid))
        ADMIN.turn_on(index)
        slot = ADMIN.slot(index)
        assert slot is not None
        yield slot
        ADMIN.release(index)
    ADMIN.resize(0)


@contextmanager
def goes_on(foreign: Slot) -> Iterator[None]:
    """Checks that a kdamond keeps its thread and setup, and aggregates afterwards."""
    yield
    assert ADMIN.slot(foreign.index) == foreign
    assert ADMIN.intervals_us(foreign.index) == (50_000, 500_000)
    point = tracepoint.find()
    assert point is not None
    assert foreign.kdamond is not None
    reader = RingReader(point, foreign.kdamond, regions=100)
    try:
        until(reader.read, reader.filenos())
    finally:
        reader.close()


def until(found: Callable[[], list[T]], filenos: list[int]) -> list[T]:
    """Polls until there is something, and returns that."""
    deadline = time.monotonic() + WITHIN_S
    poll = select.poll()
    for fileno in filenos:
        poll.register(fileno, select.POLLIN)
    while time.monotonic() < deadline:
        if result := found():
            return result
        poll.poll(500)
    raise AssertionError(f"nothing within {WITHIN_S} s")


def hot_regions(accesses: Accesses) -> NDArray[np.void]:
    """Returns those with at least half of the accesses of the hottest.

    Not of what can be counted: where the host has others to run, a page is touched less often.
    """
    counted = accesses.regions["nr_accesses"]
    found: NDArray[np.void] = accesses.regions[
        (counted > 0) & (counted * 2 >= counted.max(initial=0))
    ]
    return found


def names_window(accesses: Accesses, workload: Workload) -> bool:
    """Says whether what is hot is the hot window and next to nothing else."""
    hot = hot_regions(accesses)
    inside = np.minimum(hot["end"], workload.end).astype(np.int64) - np.maximum(
        hot["start"], workload.start
    ).astype(np.int64)
    named = int(inside[inside > 0].sum())
    besides = int((hot["end"] - hot["start"]).sum()) - named
    return named >= 0.9 * HOT_MIB * MIB and besides <= 0.2 * HOT_MIB * MIB


def expect_window(session: Session, workload: Workload) -> list[Accesses]:
    """Waits for a snapshot that names the hot window; a failure shows what the last ones did."""
    last: deque[Accesses] = deque(maxlen=SHOWN)

    def found() -> list[Accesses]:
        polled = session.poll()
        last.extend(polled)
        return [accesses for accesses in polled if names_window(accesses, workload)]

    try:
        return until(found, session.filenos())
    except AssertionError as error:
        shown = "\n".join(f"{each.max_accesses} at most: {hot_regions(each)}" for each in last)
        raise AssertionError(f"{error}: {workload} is not what was hot:\n{shown}") from None


def test_the_hot_window_is_named(workload: Workload, journal: Journal) -> None:
    with Session(CONFIG, journal) as session:
        session.watch(workload.pid)
        assert session.way == "tracepoint"

        (found, *_) = expect_window(session, workload)

        assert found.pid == workload.pid
        assert abs(found.at_s - time.monotonic()) < 10
        assert session.losses == 0


def test_sampling_ends_with_nothing_left(workload: Workload, journal: Journal) -> None:
    slots = ADMIN.count()
    switches = {module: ADMIN.exclusive_switch(module).read_text() for module in KNOWN_EXCLUSIVE}

    with Session(CONFIG, journal) as session:
        session.watch(workload.pid)
        assert any(slot.is_on for slot in ADMIN.slots())

    assert ADMIN.count() == slots
    assert all(slot.is_free for slot in ADMIN.slots())
    assert switches == {
        module: ADMIN.exclusive_switch(module).read_text() for module in KNOWN_EXCLUSIVE
    }


def test_a_foreign_kdamond_goes_on(workload: Workload, journal: Journal, foreign: Slot) -> None:
    with goes_on(foreign), Session(CONFIG, journal) as session:
        session.watch(workload.pid)
        expect_window(session, workload)
    assert ADMIN.count() == 3
    assert [slot.is_free for slot in ADMIN.slots()] == [False, True, True]


def test_who_holds_the_last_slot_is_named(
    workload: Workload, journal: Journal, foreign: Slot
) -> None:
    with ExitStack() as stack:
        session = stack.enter_context(Session(CONFIG, journal))
        others = [stack.enter_context(sleeper()) for _ in range(2)]
        for other in others:
            session.watch(Pid(other.pid))

        with pytest.raises(Conflict, match=f"kdamond 0 .*pid {foreign.kdamond}; vaddr of"):
            session.watch(workload.pid)

        assert set(session.tuning) == {other.pid for other in others}


@pytest.mark.parametrize("module", KNOWN_EXCLUSIVE)
def test_who_holds_damon_for_itself_is_named(
    workload: Workload, journal: Journal, without_damon_stat: None, module: str
) -> None:
    switch = ADMIN.exclusive_switch(module)
    switch.write_text("Y")
    try:
        config = replace(CONFIG, take_over=False)
        with Session(config, journal) as session, pytest.raises(ExclusiveUse, match=module):
            session.watch(workload.pid)
        assert switch.read_text() == "Y\n"
    finally:
        switch.write_text("N")


def test_taking_over_stops_damon_stat_alone_and_puts_it_back(
    workload: Workload, journal: Journal
) -> None:
    """Where there is no damon_stat, nothing is taken over."""
    before = STAT.read_text() if STAT.exists() else None

    with Session(CONFIG, journal) as session:
        session.watch(workload.pid)
        taken = [change for change in journal.changes.values() if isinstance(change, Tunable)]
        if before is None:
            assert taken == []
        else:
            assert taken == [Tunable(path=str(STAT), before="Y", after="N")]
            assert STAT.read_text() == "N\n"

    assert (STAT.read_text() if STAT.exists() else None) == before


@pytest.fixture
def without_tracefs() -> Iterator[None]:
    """Unmounts it, and debugfs, which would mount it again at a look."""
    mounted = [
        line.split()[:3]
        for line in Path("/proc/mounts").read_text().splitlines()
        if line.split()[2] in ("tracefs", "debugfs")
    ]
    for _, place, _ in reversed(mounted):
        subprocess.run(["umount", "--lazy", place], check=True)
    yield
    for source, place, kind in mounted:
        subprocess.run(["mount", "-t", kind, source, place], check=True)


def test_without_tracefs_regions_are_asked_for(
    workload: Workload, journal: Journal, without_tracefs: None
) -> None:
    assert tracepoint.find() is None

    with Session(CONFIG, journal) as session:
        session.watch(workload.pid)
        assert session.way == "tried_regions"
        expect_window(session, workload)
        assert session.tuning[workload.pid].max_regions == 100

    assert all(slot.is_free for slot in ADMIN.slots())


@contextmanager
def watching(state_dir: Path, pid: Pid) -> Iterator["subprocess.Popen[str]"]:
    """A process of its own that watches another; the block is to end it."""
    program = Path(__file__).with_name("hold_session.py")
    command = [sys.executable, str(program), str(state_dir), str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        yield process


def test_a_killed_session_is_undone_and_a_foreign_kdamond_goes_on(
    workload: Workload, foreign: Slot, tmp_path: Path
) -> None:
    with goes_on(foreign):
        with watching(tmp_path, workload.pid) as killed:
            assert [slot.is_on for slot in ADMIN.slots()] == [True, False, True]
            killed.kill()

        with Journal(tmp_path) as journal:
            told = journal.undo()
            assert journal.undo() == []

        assert [slot.is_free for slot in ADMIN.slots()] == [False, True, True]
        assert told == [f"kdamond 2 of process {workload.pid} stopped, its slot emptied"]


def test_a_killed_session_alone_leaves_no_slots_behind(workload: Workload, tmp_path: Path) -> None:
    before = STAT.read_text() if STAT.exists() else None
    with watching(tmp_path, workload.pid) as killed:
        killed.kill()

    with Journal(tmp_path) as journal:
        assert any(isinstance(change, Slots) for change in journal.changes.values())
        journal.undo()

    assert ADMIN.count() == 0
    assert (STAT.read_text() if STAT.exists() else None) == before


def test_a_target_that_exits_is_told_and_another_goes_on(
    workload: Workload, journal: Journal
) -> None:
    with Session(CONFIG, journal) as session, sleeper() as short_lived:
        session.watch(workload.pid)
        session.watch(Pid(short_lived.pid))
        assert session.gone() == []

        short_lived.kill()

        assert until(session.gone, session.filenos()) == [short_lived.pid]
        assert [slot.targets for slot in ADMIN.slots() if slot.is_on] == [(workload.pid,)]
        expect_window(session, workload)


def test_a_kdamond_that_somebody_stops_is_told(workload: Workload, journal: Journal) -> None:
    with Session(CONFIG, journal) as session:
        session.watch(workload.pid)
        (ours,) = (slot for slot in ADMIN.slots() if slot.is_on)

        ADMIN.command(ours.index, "off")

        assert until(session.gone, session.filenos()) == [workload.pid]


def test_what_cannot_be_watched_is_named(journal: Journal) -> None:
    with Session(CONFIG, journal) as session:
        with pytest.raises(ProcessLookupError, match="no process 4194303"):
            session.watch(Pid(4194303))
        with pytest.raises(TierdError, match=r"2 \(kthreadd\) is a kernel thread"):
            session.watch(Pid(2))
    assert all(slot.is_free for slot in ADMIN.slots())


def test_a_budget_is_kept_by_looking_less_finely(workload: Workload, journal: Journal) -> None:
    """An emulated kdamond takes far more than a hundredth of a core, so there is thrift at once."""
    with Session(replace(CONFIG, cpu_percent=0.1), journal) as session:
        session.watch(workload.pid)

        def tightened() -> list[int]:
            session.poll()
            tuned = session.tuning[workload.pid]
            return [tuned.sample_us] if tuned.thrift > 1 else []

        (sample_us,) = until(tightened, session.filenos())

        (ours,) = (slot for slot in ADMIN.slots() if slot.is_on)
        assert sample_us > CONFIG.sample_us
        assert ADMIN.intervals_us(ours.index)[0] >= sample_us


def test_where_the_buffer_lies_is_seen(workload: Workload) -> None:
    pieces = np.zeros(2, PIECE)
    pieces["start"] = workload.start, workload.start
    pieces["end"] = workload.end, workload.start + 4 * os.sysconf("SC_PAGE_SIZE")
    pieces["probed_s"] = -np.inf

    residence.probe(
        workload.pid,
        pieces,
        np.array([0, 1], np.int8),
        budget_pages=100,
        now_s=1.0,
        rng=np.random.default_rng(),
    )

    assert pieces["resident"][:, :2].tolist() == [[0.0, 1.0], [0.0, 1.0]]
