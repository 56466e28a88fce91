# SPDX-License-Identifier: Apache-2.0
"""What the shootout makes of the seconds that its loads tell."""

import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from typing import cast

import pytest
from benches import shootout
from benches._contenders import Contender
from benches._costs import moved_pages, pages_on
from benches._loads import Load
from benches._runs import Pace, Run, Second, at_speed, least_pages, second
from guests.errors import CommandFailed, EmulatorFault
from guests.workloads import Hotset, Sample

HOT, COLD = 100, 300


def sample(t: float = 0.0, *, window: int = 0, hits: float = 0.0, ops: float = 1.0) -> Sample:
    """A second of a program."""
    return Sample(
        t=t,
        ops_per_s=ops,
        window=window,
        hot_pages=HOT,
        hot_on_fast=0,
        cold_pages=COLD,
        cold_on_slow=COLD,
        absent=0,
        hit_ratio=hits,
        hot_ratio=0.9,
    )


def pace(*ops: float, speed: float = 100.0) -> Pace:
    return Pace(ops_per_s=ops, instructions_per_s=speed)


ALONE, BUSY = pace(80, 80), pace(60, 60, speed=80)
"""Each second takes 20 instructions whatever the CPU's speed is."""


def run(seconds: Sequence[Second], own: Pace = ALONE) -> Run:
    return Run(
        load="",
        contender="",
        seconds=tuple(seconds),
        pace=own,
        alone=ALONE,
        busy=BUSY,
        moved_pages=0,
        least_pages=1,
        cpu_percent=0.0,
    )


def seconds(*hits: float, window: int = 0, since: float = 0.0) -> list[Second]:
    return [second([sample(since + t, window=window, hits=share)]) for t, share in enumerate(hits)]


def test_programs_count_by_their_accesses() -> None:
    both = second([sample(hits=1.0, ops=30), sample(hits=0.0, ops=10)])
    assert both.hit_ratio == 0.75
    assert both.ops_per_s == (30, 10)


def test_the_slowest_program_tells_the_time() -> None:
    assert second([sample(3.0), sample(2.5)]).t == 2.5


class Told:
    """A fake program, of whose own time so much passes between two looks at what it tells."""

    def __init__(self, since_s: float, step_s: float) -> None:
        self.t, self.step_s = since_s, step_s

    def latest(self) -> Sample:
        self.t += self.step_s
        return sample(self.t)


def test_programs_are_sampled_until_the_slowest_has_run_for_so_long() -> None:
    programs = cast("Sequence[Hotset]", [Told(7.0, 1.25), Told(2.0, 1.0)])
    samples = shootout.sampled(programs, 3)
    assert [[one.t for one in row] for row in samples] == [
        [8.25, 3.0],
        [9.5, 4.0],
        [10.75, 5.0],
        [12.0, 6.0],
    ]


def test_the_hot_set_has_arrived_with_95_percent_of_its_hits() -> None:
    done = run(seconds(0.0, 0.85, 0.86, 0.9))
    assert done.has_arrived
    assert done.arrived_s == 2


def test_a_first_second_is_no_arrival_where_the_next_ones_miss() -> None:
    done = run(seconds(0.88, 0.6, 0.6, 0.6, 0.6, 0.86, 0.86, 0.9, 0.84, 0.86))
    assert done.has_arrived
    assert done.arrived_s == 5
    assert not run(seconds(0.88, 0.6, 0.6)).has_arrived


def test_a_window_that_never_arrives_counts_with_its_length() -> None:
    done = run(seconds(0.0, 0.9, 0.9) + seconds(0.0, 0.1, 0.2, 0.3, window=1, since=3))
    assert not done.has_arrived
    assert done.arrived_s == (1 + 3) / 2


def test_throughput_is_that_of_the_program_that_fares_worst() -> None:
    assert run([], pace(40, 72)).throughput == 0.5


@pytest.mark.parametrize(("ops", "speed"), [(60, 80), (70, 90), (90, 110), (20, 40)])
def test_throughput_is_not_lost_where_the_cpu_was_slower(ops: float, speed: float) -> None:
    assert run([], pace(ops, ops, speed=speed)).throughput == 1.0


def test_a_cpu_that_is_always_as_fast_has_the_accesses_it_had_alone() -> None:
    assert at_speed(100, pace(80), pace(79)) == (80,)


@pytest.mark.parametrize(
    ("window", "room", "least"),
    [
        (0, 2 * HOT, HOT),  # once up
        (1, 2 * HOT, 2 * HOT),  # both windows have room
        (1, HOT, 3 * HOT),  # the first one has to go back
    ],
)
def test_the_least_is_each_window_up_and_what_lacks_room_down(
    window: int, room: int, least: int
) -> None:
    assert least_pages([sample()], [sample(window=window)], HOT, room) == least


@pytest.mark.parametrize(("room", "makes_way"), [(1000, 0), (HOT + 20, 30)])
def test_what_is_held_at_the_end_had_to_be_moved(room: int, makes_way: int) -> None:
    assert least_pages([sample()], [sample()], HOT + 50, room) == HOT + 50 + makes_way


def test_what_a_process_has_on_a_node_is_told_of_all_its_mappings() -> None:
    maps = """\
5600a0000000 default file=/usr/bin/redis-server mapped=400 N0=100 N1=300 kernelpagesize_kB=4
7f12c8000000 default anon=900 dirty=900 active=0 N1=200 N0=700 kernelpagesize_kB=4
7f12d0000000 default anon=5 dirty=5 N10=5 kernelpagesize_kB=4
7ffd00000000 default
"""
    assert pages_on([0], maps) == 800
    assert pages_on([0, 10], maps) == 805


def test_what_is_moved_within_a_node_does_not_count() -> None:
    histogram = """# event histogram
#
# trigger info: hist:keys=reason:vals=hitcount,succeeded:sort=hitcount:size=2048 [active]
#

{ reason:          0 } hitcount:          3  succeeded:         64
{ reason:          8 } hitcount:         12  succeeded:       1000
{ reason:          5 } hitcount:        200  succeeded:        200

Totals:
    Hits: 215
    Entries: 3
    Dropped: 0
"""
    assert moved_pages(histogram) == 1200


def contender(name: str, *, is_ours: bool = False) -> Contender:
    return Contender(name=name, placing=lambda _: nullcontext(), is_ours=is_ours)


LOAD = Load(name="load", told="", programs=lambda *_: [], free_mib=1)
KERNEL, DAMO, OURS = contender("kernel"), contender("damo"), contender("ours", is_ours=True)


def rounds(name: str, *hits: float) -> list[Run]:
    return [replace(run(seconds(share)), contender=name) for share in hits]


def test_rounds_are_compared_by_their_medians() -> None:
    """No contender is the better one by its luckiest round."""
    runs = {
        "kernel": rounds("kernel", 0.8, 0.99, 0.7),
        "nothing": rounds("nothing", 0.1, 0.0, 0.0),
        "tierd": rounds("tierd", 0.81, 0.5, 0.9),
    }
    _, beyond, until, *_ = shootout.compare(LOAD, runs)
    assert "beyond the best of kernel, nothing" in beyond.name
    assert [beyond.value, beyond.lowest, beyond.highest] == pytest.approx([1, -30, 10])
    assert until.at_most == 0


def test_rounds_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = list[str]()
    monkeypatch.setattr(shootout, "FOLDER", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(shootout, "make_database", lambda: None)
    Guests(monkeypatch, tried.append)
    shootout.run(["zipf", "kernel", "tierd"], rounds=2, jobs=1)
    assert tried == ["kernel", "tierd"] * 2


class Guests:
    """Fake guests, in which a cell may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: Callable[[str], None]) -> None:
        self.booted, self.failing = 0, failing
        monkeypatch.setattr(shootout, "boot", self.boot)
        monkeypatch.setattr(shootout, "count_moves", lambda _: None)
        monkeypatch.setattr(shootout, "tried", self.tried)

    @contextmanager
    def boot(self, *_: object) -> Iterator[None]:
        self.booted += 1
        yield

    def tried(self, _: object, load: Load, one: Contender, __: int) -> Run:
        self.failing(one.name)
        done = run(seconds(0.5))
        return replace(done, load=load.name, contender=one.name)

    def all_tried(self, *contenders: Contender, jobs: int = 1) -> list[str]:
        runs = shootout.all_tried([(LOAD, one) for one in contenders], 1, jobs)
        return [run.contender for run in runs]


def test_what_another_contender_has_spoilt_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(name: str) -> None:
        if name == "damo":
            raise CommandFailed("redis-cli ended with 1")

    guests = Guests(monkeypatch, failing)
    assert guests.all_tried(KERNEL, DAMO, OURS) == ["kernel", "ours"]
    assert guests.booted == 3
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "load, damo: redis-cli ended with 1: again, in another guest"
    assert told[1] == "load, damo: redis-cli ended with 1: it is left out"


def test_what_fails_under_one_of_ours_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str) -> None:
        if name == "ours":
            raise CommandFailed("tierd ended with 1")

    with pytest.raises(CommandFailed):
        Guests(monkeypatch, failing).all_tried(OURS, KERNEL)


def test_as_many_are_run_at_once_as_there_are_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Barrier(2, timeout=10)

    def failing(_: str) -> None:
        together.wait()

    guests = Guests(monkeypatch, failing)
    names = guests.all_tried(KERNEL, DAMO, OURS, OURS, jobs=2)
    assert sorted(names) == ["damo", "kernel", "ours", "ours"]
    assert guests.booted == 2


def test_no_other_is_begun_once_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, together, cleared = list[str](), Barrier(2, timeout=10), Event()

    class Left(deque[shootout.Cell]):
        def clear(self) -> None:
            super().clear()
            cleared.set()

    monkeypatch.setattr(shootout, "deque", Left)

    def failing(name: str) -> None:
        tried.append(name)
        together.wait()
        if name == "ours":
            raise CommandFailed("tierd ended with 1")
        cleared.wait(timeout=10)

    with pytest.raises(CommandFailed):
        Guests(monkeypatch, failing).all_tried(OURS, KERNEL, DAMO, jobs=2)
    assert sorted(tried) == ["kernel", "ours"]


def test_where_the_emulator_failed_it_is_tried_again_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "console").touch()
    faults = 1

    def failing(name: str) -> None:
        nonlocal faults
        if name == "damo" and faults:
            faults -= 1
            raise EmulatorFault("it ended", tmp_path / "console")

    guests = Guests(monkeypatch, failing)
    assert guests.all_tried(KERNEL, DAMO, OURS) == ["kernel", "damo", "ours"]
    assert guests.booted == 2
    faults = 2
    with pytest.raises(EmulatorFault):
        guests.all_tried(DAMO)
