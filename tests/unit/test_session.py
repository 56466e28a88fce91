# SPDX-License-Identifier: Apache-2.0
"""Session over an imagined DAMON, and real processes to watch."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit import fake_damon
from tests.unit.fake_damon import ADMIN, FakeDamon
from tierd.bulk import REGION
from tierd.config import DamonConfig
from tierd.errors import Conflict, TierdError, UnsupportedKernel
from tierd.journal import Journal, Kdamond
from tierd.kernel import damon, process, task, tracepoint
from tierd.kernel.damon import Admin, ExclusiveUse, Setup
from tierd.kernel.ring import Layout, Snapshot
from tierd.kernel.tracepoint import Tracepoint
from tierd.migrate.schemes import KernelSchemes, Make, make_none
from tierd.model import Action, NodeId, NodeShare, Pid, Quota, QuotaGoal, Scheme
from tierd.sample import governor, kdamonds, session, tuning, zoom
from tierd.sample.kdamonds import SLOTS
from tierd.sample.session import Session

FOREIGN = 88
REGIONS = np.array([(4096, 8192, 20, 1), (8192, 1 << 20, 0, 3)], REGION)


class FakeRing:
    """Stands for the perf ring of a kdamond."""

    opened: ClassVar[list["FakeRing"]] = []
    waiting: ClassVar[list[Snapshot]] = []
    error: ClassVar[OSError | None] = None

    def __init__(self, _: Tracepoint, kdamond: Pid, *, regions: int) -> None:
        if FakeRing.error is not None:
            raise FakeRing.error
        self.kdamond = kdamond
        self.regions = regions
        self.snapshots: list[Snapshot] = [*FakeRing.waiting]
        self.lost = 0
        self.ended = False
        self.closed = False
        FakeRing.opened.append(self)

    def read(self) -> list[Snapshot]:
        taken, self.snapshots = self.snapshots, []
        return taken

    def has_ended(self) -> bool:
        return self.ended

    def filenos(self) -> list[int]:
        return []

    def close(self) -> None:
        self.closed = True


class Now(Executor):
    """Runs what is submitted at once, so that tests need not wait."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except (OSError, TierdError) as error:
            future.set_exception(error)
        return future


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.cpu_s = 0.0
        self.resident_bytes = 1 << 40

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def fake(tmp_path: Path) -> FakeDamon:
    return FakeDamon(tmp_path / "root", processes=[FOREIGN])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Has time and CPU time stand still unless told, and targets be large."""
    clock = Clock()
    monkeypatch.setattr(process, "read_resident_bytes", lambda _: clock.resident_bytes)
    monkeypatch.setattr(task, "cpu_s", lambda _: clock.cpu_s)
    monkeypatch.setattr(session, "time", clock)
    monkeypatch.setattr(session, "ThreadPoolExecutor", lambda *_, **__: Now())
    return clock


@pytest.fixture
def journal(fake: FakeDamon, tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "state", root=fake.root, files=fake) as journal:
        yield journal


@pytest.fixture
def open_session(
    fake: FakeDamon, journal: Journal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Session]]:
    monkeypatch.setattr(session, "RingReader", FakeRing)
    monkeypatch.setattr(tracepoint, "find", lambda _: Tracepoint(id=767, layout=Layout()))
    monkeypatch.setattr(FakeRing, "opened", [])
    monkeypatch.setattr(FakeRing, "error", None)
    monkeypatch.setattr(FakeRing, "waiting", [])
    with ExitStack() as stack:
        yield lambda **config: stack.enter_context(
            Session(DamonConfig(**config), journal, root=fake.root, files=fake)
        )


@pytest.fixture
def target(fake: FakeDamon) -> Iterator[subprocess.Popen[bytes]]:
    with sleeper(fake) as process:
        yield process


@contextmanager
def sleeper(fake: FakeDamon) -> Iterator[subprocess.Popen[bytes]]:
    """A process to watch, known to the imagined kernel too."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        fake.processes.add(process.pid)
        try:
            yield process
        finally:
            process.kill()


def snapshot(at_s: float, regions: NDArray[np.void] = REGIONS) -> Snapshot:
    return Snapshot(target_id=0, at_s=at_s, regions=regions)


Target = subprocess.Popen[bytes]
Open = Callable[..., Session]


def test_a_session_leaves_nothing(
    fake: FakeDamon, journal: Journal, open_session: Open, target: Target
) -> None:
    with open_session() as sampled:
        sampled.watch(Pid(target.pid))
        assert list(fake.running) == [SLOTS - 1]

    assert fake.running == {}
    assert fake.values == {f"{ADMIN}/nr_kdamonds": "0"}
    assert journal.changes == {}
    assert [ring.closed for ring in FakeRing.opened] == [True]


def test_the_journal_knows_the_kdamond_by_its_pid(
    fake: FakeDamon, journal: Journal, open_session: Open, target: Target
) -> None:
    open_session().watch(Pid(target.pid))

    (kdamond,) = (c for c in journal.changes.values() if isinstance(c, Kdamond))
    assert kdamond.pid == fake.running[SLOTS - 1] == FakeRing.opened[0].kdamond
    assert kdamond.target == target.pid


def test_snapshots_come_by_time_with_their_intervals(
    fake: FakeDamon, open_session: Open, target: Target
) -> None:
    sampled = open_session()
    with sleeper(fake) as other:
        sampled.watch(Pid(target.pid))
        sampled.watch(Pid(other.pid))
        first, second = FakeRing.opened
        first.snapshots = [snapshot(1.0), snapshot(3.0)]
        second.snapshots = [snapshot(2.0)]

        found = sampled.poll()

        assert [(a.pid, a.at_s) for a in found] == [
            (target.pid, 1.0),
            (other.pid, 2.0),
            (target.pid, 3.0),
        ]
        assert (found[0].sample_s, found[0].aggregation_s) == (0.02, 0.4)
        assert found[0].regions is REGIONS
        assert sampled.poll() == []


def test_a_target_that_exits_is_told_once_and_disturbs_no_other(
    fake: FakeDamon, open_session: Open, target: Target
) -> None:
    sampled = open_session()
    with sleeper(fake) as other:
        sampled.watch(Pid(target.pid))
        sampled.watch(Pid(other.pid))
        assert sampled.gone() == []

        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        fake.exit(other.pid)

        assert sampled.gone() == [other.pid]
        assert sampled.gone() == []
    assert list(fake.running) == [SLOTS - 1]
    assert [ring.closed for ring in FakeRing.opened] == [False, True]


def test_a_kdamond_that_somebody_stopped_is_told(
    fake: FakeDamon, open_session: Open, target: Target
) -> None:
    sampled = open_session()
    sampled.watch(Pid(target.pid))
    FakeRing.opened[0].ended = True
    fake.running.clear()

    assert sampled.gone() == [target.pid]


def test_watching_twice_is_watching_once(open_session: Open, target: Target) -> None:
    sampled = open_session()
    sampled.watch(Pid(target.pid))
    sampled.watch(Pid(target.pid))

    assert len(FakeRing.opened) == 1


@pytest.mark.parametrize(("aggregation_us", "regions"), [(400_000, 5000), (10_000, 16_000)])
def test_a_ring_has_room_for_seconds_within_bounds(
    open_session: Open, target: Target, aggregation_us: int, regions: int
) -> None:
    open_session(aggregation_us=aggregation_us, sample_us=500).watch(Pid(target.pid))

    assert FakeRing.opened[0].regions == regions


def test_losses_outlive_their_target(open_session: Open, target: Target) -> None:
    sampled = open_session()
    sampled.watch(Pid(target.pid))
    FakeRing.opened[0].lost = 7
    sampled.unwatch(Pid(target.pid))
    sampled.unwatch(Pid(target.pid))

    assert sampled.losses == 7


def test_a_kdamond_that_cannot_be_stopped_now_is_stopped_with_the_next(
    fake: FakeDamon,
    open_session: Open,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(damon, "LOCK_WAIT_S", 0.0)
    sampled = open_session()
    with sleeper(fake) as other:
        sampled.watch(Pid(target.pid))
        sampled.watch(Pid(other.pid))
        fake.busy = 1000
        sampled.unwatch(Pid(target.pid))
        assert len(fake.running) == 2
        assert "has been busy" in caplog.text
        fake.busy = 0
        sampled.unwatch(Pid(other.pid))
    assert fake.running == {}


def test_a_foreign_kdamond_is_left_alone_and_so_are_its_slots(
    fake: FakeDamon, open_session: Open, target: Target
) -> None:
    Admin(fake.root, fake).resize(3)
    fake.start_foreign(0, FOREIGN)
    foreign = dict(fake.running)

    with open_session() as sampled:
        sampled.watch(Pid(target.pid))
        assert sorted(fake.running) == [0, 2]

    assert fake.running == foreign
    assert fake.values[f"{ADMIN}/nr_kdamonds"] == "3"


def test_who_holds_every_slot_is_named(fake: FakeDamon, open_session: Open, target: Target) -> None:
    Admin(fake.root, fake).resize(1)
    fake.start_foreign(0, FOREIGN)

    with pytest.raises(Conflict, match=r"kdamond 0 \(on, pid 400; vaddr of process 88\)"):
        open_session().watch(Pid(target.pid))


def test_more_targets_than_slots_are_refused(
    fake: FakeDamon, open_session: Open, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kdamonds, "SLOTS", 1)
    sampled = open_session()
    sampled.watch(Pid(target.pid))

    with sleeper(fake) as other, pytest.raises(Conflict, match="watches 1 processes already"):
        sampled.watch(Pid(other.pid))
    assert list(sampled.tuning) == [target.pid]


def test_a_slot_set_up_but_off_is_not_wiped(
    fake: FakeDamon, open_session: Open, target: Target
) -> None:
    Admin(fake.root, fake).resize(1)
    fake.start_foreign(0, FOREIGN)
    fake.write(fake.root / ADMIN / "0/state", "off")
    before = dict(fake.values)

    with pytest.raises(Conflict, match=r"kdamond 0 \(off; vaddr of process 88\)"):
        open_session().watch(Pid(target.pid))
    assert fake.values == before


def test_damon_stat_is_named_and_left_without_leave(
    fake: FakeDamon, journal: Journal, open_session: Open, target: Target
) -> None:
    fake.exclusive["damon_stat"] = True

    with open_session() as sampled, pytest.raises(ExclusiveUse, match="damon_stat"):
        sampled.watch(Pid(target.pid))

    assert fake.exclusive == {"damon_stat": True}
    assert fake.values == {f"{ADMIN}/nr_kdamonds": "0"}
    assert journal.changes == {}


def test_damon_stat_is_stopped_with_leave_and_put_back(
    fake: FakeDamon, journal: Journal, open_session: Open, target: Target
) -> None:
    fake.exclusive["damon_stat"] = True

    with open_session(take_over=True) as sampled:
        sampled.watch(Pid(target.pid))
        assert fake.exclusive == {"damon_stat": False}

    assert fake.exclusive == {"damon_stat": True}
    assert journal.changes == {}


def test_a_journal_undone_in_mid_session_puts_damon_stat_back_last(
    fake: FakeDamon, journal: Journal, open_session: Open, target: Target
) -> None:
    fake.exclusive["damon_stat"] = True
    with open_session(take_over=True) as sampled:
        sampled.watch(Pid(target.pid))

        journal.undo()

        assert fake.running == {}
        assert fake.exclusive == {"damon_stat": True}


def test_what_moves_memory_itself_is_never_stopped(
    fake: FakeDamon, open_session: Open, target: Target
) -> None:
    fake.exclusive["damon_reclaim"] = True

    with pytest.raises(ExclusiveUse, match="damon_reclaim"):
        open_session(take_over=True).watch(Pid(target.pid))
    assert fake.exclusive == {"damon_reclaim": True}


def test_no_process_is_told(fake: FakeDamon, journal: Journal, open_session: Open) -> None:
    sampled = open_session()
    with pytest.raises(ProcessLookupError, match="no process 4194305"):
        sampled.watch(Pid(4194305))
    assert journal.changes == {}


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_process_that_exits_while_it_is_set_up_is_told(
    fake: FakeDamon, journal: Journal, open_session: Open, target: Target, is_reused: bool
) -> None:
    """Its number may be another process's by then, which DAMON would watch gladly."""
    write = FakeDamon.write

    def kill_first(self: FakeDamon, path: Path, value: str) -> None:
        if value == "on":
            target.kill()
            os.waitid(os.P_PID, target.pid, os.WEXITED | os.WNOWAIT)
            if not is_reused:
                fake.exit(target.pid)
        write(self, path, value)

    sampled = open_session()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeDamon, "write", kill_first)
        with pytest.raises(ProcessLookupError, match=f"no process {target.pid}"):
            sampled.watch(Pid(target.pid))

    assert not [c for c in journal.changes.values() if isinstance(c, Kdamond)]
    assert all(slot.is_free for slot in Admin(fake.root, fake).slots())


def test_a_zombie_is_gone(open_session: Open, target: Target) -> None:
    target.kill()
    os.waitid(os.P_PID, target.pid, os.WEXITED | os.WNOWAIT)

    with pytest.raises(ProcessLookupError):
        open_session().watch(Pid(target.pid))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"is_kernel_thread": True}, r"\(python\w*\S*\) is a kernel thread"),
        ({"leader": Pid(1)}, r"is a thread of process 1"),
    ],
)
def test_what_has_no_memory_of_its_own_is_refused(
    open_session: Open,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    other: dict[str, Any],
    told: str,
) -> None:
    real = process.read_process(Pid(target.pid))
    assert real is not None
    monkeypatch.setattr(process, "read_process", lambda _: replace(real, **other))

    with pytest.raises(TierdError, match=told):
        open_session().watch(Pid(target.pid))


def test_without_the_interface_there_is_no_session(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedKernel):
        Session(DamonConfig(), journal, root=tmp_path)


def test_perf_refused_means_tried_regions(
    fake: FakeDamon, open_session: Open, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRing, "error", PermissionError(1, "perf_event_open"))
    sampled = open_session()
    assert sampled.way == "tracepoint"

    sampled.watch(Pid(target.pid))

    assert sampled.way == "tried_regions"
    context = f"{ADMIN}/{SLOTS - 1}/contexts/0"
    assert fake.values[f"{context}/schemes/0/action"] == "stat"
    assert fake.values[f"{context}/monitoring_attrs/nr_regions/max"] == "100"
    assert len(fake.running) == 1


def test_tried_regions_are_read_in_order(
    fake: FakeDamon, open_session: Open, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracepoint, "find", lambda _: None)
    sampled = open_session()
    sampled.watch(Pid(target.pid))
    put_regions(fake, REGIONS[::-1])

    assert sampled.poll() == []
    (found,) = sampled.poll()

    assert found.regions.tolist() == REGIONS.tolist()


@pytest.mark.parametrize(
    "spoilt",
    [
        [(8192, 4096, 1, 1)],
        [(4096, 12288, 1, 1), (8192, 16384, 1, 1)],
        [(n * 4096, n * 4096 + 4096, 1, 1) for n in range(401)],
        [],
    ],
    ids=["turned", "overlapping", "too many", "none"],
)
def test_spoilt_tried_regions_are_no_snapshot(
    fake: FakeDamon,
    open_session: Open,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    spoilt: list[tuple[int, ...]],
) -> None:
    monkeypatch.setattr(tracepoint, "find", lambda _: None)
    sampled = open_session()
    sampled.watch(Pid(target.pid))
    put_regions(fake, np.array(spoilt, REGION))
    sampled.poll()

    assert sampled.poll() == []
    assert sampled.gone() == []


def put_regions(fake: FakeDamon, regions: "np.ndarray[Any, Any]") -> None:
    folder = f"{ADMIN}/{SLOTS - 1}/contexts/0/schemes/0/tried_regions"
    fake.values[f"{folder}/total_bytes"] = "1"
    for index, region in enumerate(regions):
        for name in REGION.names or ():
            fake.values[f"{folder}/{index}/{name}"] = str(region[name])


def test_a_costly_kdamond_looks_less_finely(
    fake: FakeDamon, open_session: Open, target: Target, clock: Clock
) -> None:
    sampled = open_session(cpu_percent=2.0)
    pid = Pid(target.pid)
    sampled.watch(pid)

    clock.now_s += governor.JUDGE_S
    clock.cpu_s += 0.64  # 6.4 % of a core
    sampled.poll()
    sampled.poll()

    tuned = sampled.tuning[pid]
    assert tuned.cpu_percent == pytest.approx(6.4)
    assert tuned.thrift == 2.0
    assert tuned.sample_us == round(20_000 * 2**0.5)
    intervals = f"{ADMIN}/{SLOTS - 1}/contexts/0/monitoring_attrs/intervals"
    assert fake.values[f"{intervals}/sample_us"] == str(tuned.sample_us)
    assert fake.writes[-1][1] == "commit"

    clock.now_s += governor.JUDGE_S
    clock.cpu_s += 0.15
    sampled.poll()

    assert sampled.tuning[pid].cpu_percent == pytest.approx(1.5)
    assert sampled.tuning[pid].thrift == 2.0


def test_what_a_kdamond_takes_is_known_soon_and_judged_later(
    open_session: Open, target: Target, clock: Clock
) -> None:
    sampled = open_session(cpu_percent=2.0)
    pid = Pid(target.pid)
    sampled.watch(pid)
    sampled.poll()
    assert sampled.tuning[pid].cpu_percent is None
    clock.now_s += governor.FIRST_S
    clock.cpu_s += 0.1
    sampled.poll()
    assert (sampled.tuning[pid].cpu_percent, sampled.tuning[pid].thrift) == (5.0, 1.0)
    clock.now_s += governor.JUDGE_S - governor.FIRST_S
    sampled.poll()
    assert sampled.tuning[pid].cpu_percent == pytest.approx(1.0), "of all the time until then"


def test_the_budget_is_for_all_together(
    fake: FakeDamon, open_session: Open, target: Target, clock: Clock
) -> None:
    sampled = open_session(cpu_percent=4.0)
    with sleeper(fake) as other:
        for process in (target, other):
            sampled.watch(Pid(process.pid))
        clock.now_s += governor.JUDGE_S
        clock.cpu_s += 0.3  # 3 % each
        sampled.poll()
        sampled.poll()

        assert [tuned.thrift > 1 for tuned in sampled.tuning.values()] == [True, True]


def test_a_target_that_grows_is_divided_more_finely(
    fake: FakeDamon, open_session: Open, target: Target, clock: Clock
) -> None:
    sampled = open_session(cpu_percent=2.0)
    clock.resident_bytes = 500 << 20
    pid = Pid(target.pid)
    sampled.watch(pid)
    assert sampled.tuning[pid].max_regions == 500

    clock.resident_bytes = 900 << 20
    clock.now_s += governor.JUDGE_S
    sampled.poll()
    sampled.poll()

    assert (sampled.tuning[pid].max_regions, sampled.tuning[pid].thrift) == (900, 1.0)
    assert fake.writes[-1][1] == "commit"


def test_while_nothing_happens_it_is_looked_at_more_roughly(
    fake: FakeDamon, open_session: Open, target: Target, clock: Clock
) -> None:
    sampled = open_session(cpu_percent=2.0)
    pid = Pid(target.pid)
    sampled.watch(pid)
    for is_calm, thrift in (True, tuning.CALM), (False, 1.0):
        sampled.is_calm = is_calm
        sampled.poll()
        sampled.poll()
        assert sampled.tuning[pid].thrift == thrift
        assert sampled.tuning[pid].sample_us == round(20_000 * thrift**0.5)
        assert fake.writes[-1][1] == "commit"


def test_what_calm_saves_is_not_taken_for_thrift(
    open_session: Open, target: Target, clock: Clock
) -> None:
    """What is within the budget meanwhile, it is not by itself."""
    sampled = open_session(cpu_percent=2.0)
    pid = Pid(target.pid)
    sampled.watch(pid)
    sampled.is_calm = True
    sampled.poll()
    sampled.poll()
    clock.now_s += governor.JUDGE_S
    clock.cpu_s += 0.15  # 1.5 % of a core, in place of 3
    sampled.poll()
    sampled.is_calm = False
    sampled.poll()
    sampled.poll()
    assert sampled.tuning[pid].thrift == pytest.approx(3 / (tuning.AIM * 2))


def test_a_cheap_kdamond_is_left_as_it_is(
    fake: FakeDamon, open_session: Open, target: Target, clock: Clock
) -> None:
    sampled = open_session(cpu_percent=2.0)
    sampled.watch(Pid(target.pid))
    writes = len(fake.writes)

    clock.now_s += governor.JUDGE_S
    clock.cpu_s += 0.1
    sampled.poll()

    assert fake.writes[writes:] == []


def test_intervals_that_the_kernel_tuned_are_read_back(
    fake: FakeDamon, open_session: Open, target: Target, clock: Clock
) -> None:
    sampled = open_session()
    sampled.watch(Pid(target.pid))
    intervals = f"{ADMIN}/{SLOTS - 1}/contexts/0/monitoring_attrs/intervals"
    fake.values |= {f"{intervals}/sample_us": "40000", f"{intervals}/aggr_us": "800000"}

    clock.now_s += governor.READ_BACK_S
    FakeRing.opened[0].snapshots = [snapshot(clock.now_s + 0.8)]
    sampled.poll()
    FakeRing.opened[0].snapshots = [snapshot(clock.now_s + 1.6)]
    sampled.poll()
    FakeRing.opened[0].snapshots = [snapshot(clock.now_s + 2.4)]
    (found,) = sampled.poll()

    assert (found.sample_s, found.aggregation_s) == (0.04, 0.8)
    assert ("update_tuned_intervals") in [value for _, value in fake.writes]


# Looks at single pages


RANGE = range(1 << 20, 3 << 20)
PAGES = np.array([(start, start + 4096, 1, 0) for start in RANGE[::4096]], REGION)


@pytest.fixture
def looking(open_session: Open, target: Target, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session whose looks are over at once, and see PAGES."""
    monkeypatch.setattr(zoom, "POLL_S", 0.0)
    monkeypatch.setattr(zoom, "RingReader", FakeRing)
    sampled = open_session(zoom=True)
    sampled.watch(Pid(target.pid))
    FakeRing.waiting = [snapshot(3.0, PAGES)]
    return sampled


def test_a_look_is_at_single_pages_of_a_range(
    fake: FakeDamon, looking: Session, target: Target
) -> None:
    looking.zoom(Pid(target.pid), RANGE.start, RANGE.stop, per_page_s=10.0)
    assert not looking.can_zoom
    context = f"{ADMIN}/{SLOTS - 2}/contexts/0/"
    setup = {k.removeprefix(context): v for k, v in fake.writes if k.startswith(context)}
    assert setup["operations"] == "fvaddr"
    assert setup["targets/0/pid_target"] == str(target.pid)
    assert (f"{context}targets/0/regions/nr_regions", "1") in fake.writes
    assert setup["targets/0/regions/0/start"] == str(RANGE.start)
    assert setup["targets/0/regions/0/end"] == str(RANGE.stop)
    assert setup["monitoring_attrs/nr_regions/min"] == str(len(PAGES))
    assert setup["monitoring_attrs/nr_regions/max"] == str(len(PAGES))
    assert setup["monitoring_attrs/intervals/sample_us"] == "100000"

    (found,) = looking.poll()

    assert found.zoomed
    assert (found.pid, found.sample_s, found.aggregation_s) == (target.pid, 0.1, 1.0)
    assert found.at_s == 3.0
    assert found.regions is PAGES
    assert looking.zoomed_pages == len(PAGES)
    assert looking.can_zoom


def test_to_a_kernel_that_cuts_nothing_a_region_is_given_for_each_page(
    fake: FakeDamon, looking: Session, target: Target
) -> None:
    uncut = PAGES[:1].copy()
    uncut["end"] = RANGE.stop
    FakeRing.waiting = [snapshot(3.0, uncut)]
    looking.zoom(Pid(target.pid), RANGE.start, RANGE.stop, per_page_s=10.0)
    assert looking.poll() == []
    assert looking.zoomed_pages == 0

    FakeRing.waiting = [snapshot(4.0, PAGES)]
    looking.zoom(Pid(target.pid), RANGE.start, RANGE.stop, per_page_s=10.0)
    regions = f"{ADMIN}/{SLOTS - 2}/contexts/0/targets/0/regions/"
    given = {k.removeprefix(regions): v for k, v in fake.writes if k.startswith(regions)}
    assert given["1/start"] == given["0/end"]
    assert given[f"{len(PAGES) - 1}/end"] == str(RANGE.stop)
    (found,) = looking.poll()
    assert found.regions is PAGES


def test_a_look_leaves_nothing(fake: FakeDamon, looking: Session, target: Target) -> None:
    before = fake.values.copy()
    looking.zoom(Pid(target.pid), RANGE.start, RANGE.stop, per_page_s=10.0)
    assert fake.values != before
    looking.poll()
    assert fake.values == before
    assert list(fake.running) == [SLOTS - 1]
    assert FakeRing.opened[-1].closed


def test_a_look_ends_with_its_target(fake: FakeDamon, looking: Session, target: Target) -> None:
    looking.zoom(Pid(target.pid), RANGE.start, RANGE.stop, per_page_s=10.0)
    looking.unwatch(Pid(target.pid))
    assert fake.running == {}
    assert looking.poll() == []


def test_where_damon_knows_no_fixed_ranges_nothing_is_looked_at(
    fake: FakeDamon, looking: Session, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fake_damon._CONTEXT, "avail_operations", "vaddr\npaddr")
    looking.zoom(Pid(target.pid), RANGE.start, RANGE.stop, per_page_s=10.0)
    assert not looking.can_zoom
    assert list(fake.running) == [SLOTS - 1]


def test_without_the_tracepoint_or_leave_nothing_is_looked_at(
    open_session: Open, target: Target
) -> None:
    assert not open_session().can_zoom


def test_more_is_looked_at_as_long_as_that_is_cheap(clock: Clock) -> None:
    lens = zoom.Lens()

    def frame(percent: float, per_page_s: float = 100.0) -> zoom.Frame:
        return lens.frame(
            Pid(1), 0, 1 << 40, per_page_s=per_page_s, base_us=20_000, percent=percent
        )

    assert frame(2.0).pages == zoom.PAGES_FIRST
    lens.note(frame(2.0), cpu_s=0.0, took_s=2.0)
    assert frame(2.0).pages > zoom.PAGES_FIRST
    many = frame(2.0)
    lens.note(replace(many, end=many.end // 2), cpu_s=0.0, took_s=2.0)
    assert frame(2.0).pages == many.pages, "a short range tells nothing of long ones"
    lens.note(many, cpu_s=1.0, took_s=2.0)
    assert frame(2.0).pages == many.pages / zoom.STEP
    for _ in range(20):
        lens.note(frame(2.0), cpu_s=0.001 * frame(2.0).pages, took_s=2.0)
    assert frame(2.0).pages == zoom.PAGES_LEAST
    assert (frame(2.0).sample_us, frame(2.0, 0.1).sample_us) == (20_000, 100_000)


def test_a_look_that_sees_nothing_is_given_up(
    looking: Session, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoom, "GIVEN_UP_S", 0.0)
    FakeRing.waiting = []
    looking.zoom(Pid(target.pid), RANGE.start, RANGE.stop, per_page_s=10.0)
    assert looking.poll() == []
    assert looking.can_zoom


# Schemes


def promote(setup: Setup, targets: int) -> tuple[Scheme, ...]:
    goal = QuotaGoal(what=NodeShare.USED, node=NodeId(0), least_bp=9800)
    quota = Quota(bytes=4096 // targets, interval_ms=1000, goal=goal)
    least = setup.sample_us // 1000
    return (
        Scheme(action=Action.PROMOTE, least_accesses=least, destination=NodeId(0), quota=quota),
    )


def with_schemes(fake: FakeDamon, journal: Journal, make: Make = promote) -> Session:
    kernel = KernelSchemes(Admin(fake.root, fake))
    kernel.hand(make)
    return Session(DamonConfig(), journal, schemes=kernel, root=fake.root, files=fake)


def of_schemes(fake: FakeDamon, slot: int, name: str) -> str:
    return fake.values[f"{ADMIN}/{slot}/contexts/0/schemes/{name}"]


def test_targets_get_their_schemes_and_nothing_is_left(
    fake: FakeDamon, journal: Journal, open_session: Open, target: Target
) -> None:
    with with_schemes(fake, journal) as sampled, sleeper(fake) as other:
        sampled.require_schemes()
        sampled.watch(Pid(target.pid))
        assert of_schemes(fake, SLOTS - 1, "0/action") == "migrate_hot"
        assert of_schemes(fake, SLOTS - 1, "0/quotas/bytes") == "4096"
        sampled.watch(Pid(other.pid))
        sampled.poll()
        for slot in (SLOTS - 1, SLOTS - 2):
            assert of_schemes(fake, slot, "0/quotas/bytes") == "2048"

    assert fake.running == {}
    assert fake.values == {f"{ADMIN}/nr_kdamonds": "0"}
    assert journal.changes == {}


def test_a_kdamond_that_looks_less_finely_gets_other_schemes(
    fake: FakeDamon, journal: Journal, open_session: Open, target: Target, clock: Clock
) -> None:
    with with_schemes(fake, journal) as sampled:
        sampled.watch(Pid(target.pid))
        assert of_schemes(fake, SLOTS - 1, "0/access_pattern/nr_accesses/min") == "20"
        clock.now_s += governor.JUDGE_S
        clock.cpu_s += 0.64  # 6.4 % of a core, where 2 are allowed

        for _ in range(2):
            sampled.poll()

        assert of_schemes(fake, SLOTS - 1, "0/access_pattern/nr_accesses/min") == "28"
        assert fake.writes[-1] == (f"{ADMIN}/{SLOTS - 1}/state", "commit")


def test_read_by_tried_regions_the_schemes_come_behind(
    fake: FakeDamon,
    journal: Journal,
    open_session: Open,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracepoint, "find", lambda _: None)
    with with_schemes(fake, journal) as sampled:
        sampled.watch(Pid(target.pid))

        actions = [of_schemes(fake, SLOTS - 1, f"{number}/action") for number in (0, 1)]
        assert actions == ["stat", "migrate_hot"]


def test_schemes_that_the_kernel_does_not_know_are_refused_and_leave_nothing(
    journal: Journal, clock: Clock, tmp_path: Path
) -> None:
    old = FakeDamon(tmp_path / "old", migration=False)
    with (
        Journal(tmp_path / "other", root=old.root, files=old) as other,
        with_schemes(old, other) as sampled,
        pytest.raises(UnsupportedKernel, match="cannot place memory by itself"),
    ):
        sampled.require_schemes()
    assert old.values == {f"{ADMIN}/nr_kdamonds": "0"}


def test_while_nothing_is_to_be_moved_there_is_no_scheme(
    fake: FakeDamon, journal: Journal, open_session: Open, target: Target
) -> None:
    with with_schemes(fake, journal, make_none) as sampled:
        sampled.watch(Pid(target.pid))
        sampled.poll()

        assert of_schemes(fake, SLOTS - 1, "nr_schemes") == "0"
