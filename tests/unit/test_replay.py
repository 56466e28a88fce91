# SPDX-License-Identifier: Apache-2.0
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.unit.machine import (
    AGGREGATION_S,
    DRAM,
    HOT,
    MOVE_NS,
    OTHER,
    PAGES,
    SPAN,
    FakeSampler,
    Machine,
    Memory,
    half_hot,
)
from tests.unit.replay import MIB
from tests.unit.world import snapshot
from tierd.bulk import Accesses
from tierd.cli.control import main
from tierd.config import parse
from tierd.config.check import Document
from tierd.daemon import Round
from tierd.decide.steps import HEADROOM_LOW
from tierd.errors import NotFound, TierdError
from tierd.model import PAGE_BYTES, NodeId, NodeRoom, TenantClass
from tierd.observe.moments import load
from tierd.observe.recording import BadRecording, Frame, Kind, encode, preamble, read
from tierd.recorder import Recorder, Recordings, recording_to
from tierd.replay import configured, replay

SECONDS = 40
WINDOW_PAGES = PAGES // 4
"""Hot of each half in turn: the fast tier has room for one window and a half."""


def moving_window(seconds: float) -> list[Accesses]:
    snapshots = round(seconds / AGGREGATION_S)
    return [
        snapshot(
            *_window(number >= snapshots // 2),
            at_s=number * AGGREGATION_S,
        )
        for number in range(snapshots)
    ]


def _window(second: bool) -> tuple[list[int], list[int]]:
    start = PAGES // 2 * second
    edges = sorted({0, start, start + WINDOW_PAGES, PAGES})
    return edges, [18 if edge == start else 1 for edge in edges[:-1]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "window.tierd"


def recorded(machine: Machine, path: Path, *, moves: bool = True) -> list[float]:
    """Records a daemon; returns the hot window's share in fast memory as it was in each round."""
    machine.start(HOT, Memory(SPAN))
    hits = []
    with recording_to(path, most_bytes=1 << 20) as recorder:
        daemon = machine.daemon(FakeSampler(moving_window(SECONDS), machine), moves=moves)

        def tap(round: Round) -> None:
            start = SPAN.start + (PAGES // 2 * PAGE_BYTES) * (machine.now_s - 5000 >= SECONDS / 2)
            window = range(start, start + WINDOW_PAGES * PAGE_BYTES)
            hits.append(machine.memory[HOT].share(window, DRAM))
            recorder(round)

        daemon.record = tap
        machine.rounds(daemon, SECONDS)
        assert recorder.ended is None
    return hits


def test_a_replay_moves_what_was_moved(path: Path) -> None:
    machine = Machine(fast_bytes=24 * MIB)
    shares = recorded(machine, path)
    recording = load(path)
    found = replay(recording, configured(recording))
    assert recording.seconds == SECONDS - 1
    assert found.up_bytes + found.down_bytes == pytest.approx(
        sum(machine.mover.moved) * PAGE_BYTES, rel=0.02
    )
    # Nine in ten accesses go to the window: what it has is what is hit, but for the averages' lag.
    settled = [*range(10, 20), *range(30, 39)]
    hits = dict(zip(found.at_s.round(), found.hits[:, 0], strict=True))
    for second in settled:
        assert hits[second] == pytest.approx(shares[second], abs=0.2), second
    assert found.hit_ratio <= found.best_ratio <= 1


class Hoarded(Machine):
    """All but some of what is free are kept by single CPUs."""

    left_bytes = MIB // 2

    def rooms(self) -> dict[NodeId, NodeRoom]:
        return {
            node: NodeRoom(left := min(room.free_bytes, self.left_bytes), room.free_bytes - left)
            for node, room in super().rooms().items()
        }


def test_room_that_cpus_keep_is_planned_with_and_not_filled(path: Path) -> None:
    machine = Hoarded(fast_bytes=24 * MIB)
    recorded(machine, path, moves=False)
    recording = load(path)
    aside_bytes = 24 * MIB - Hoarded.left_bytes
    assert recording.moments[-1].aside_bytes[0] == aside_bytes
    headroom_bytes = 24 * MIB * configured(recording).policy.headroom_percent / 100
    found = replay(recording, configured(recording))
    most_bytes = Hoarded.left_bytes - HEADROOM_LOW * headroom_bytes
    assert 0.8 * most_bytes < found.up_bytes - found.down_bytes <= most_bytes
    for moment in recording.moments:
        moment.aside_bytes = ()
    known = replay(recording, configured(recording))
    assert known.up_bytes - known.down_bytes < most_bytes / 2


class Keeping(Machine):
    """Single CPUs keep a part of what is free, and go on keeping it."""

    kept_bytes = 8 * MIB

    def rooms(self) -> dict[NodeId, NodeRoom]:
        return {
            node: NodeRoom(room.free_bytes - kept, kept)
            for node, room in super().rooms().items()
            for kept in (min(room.free_bytes, self.kept_bytes),)
        }


def test_room_that_cpus_go_on_keeping_is_not_waited_for(path: Path) -> None:
    """The second window finds the first one in all the room there is but for what they keep."""
    recorded(Keeping(fast_bytes=WINDOW_PAGES * PAGE_BYTES + Keeping.kept_bytes), path, moves=False)
    recording = load(path)
    assert recording.moments[-1].aside_bytes[0] == Keeping.kept_bytes
    found = replay(recording, configured(recording))
    assert found.hits[found.at_s > SECONDS - 5, 0].min() >= 0.75


def test_what_a_round_has_no_time_for_follows_in_the_next_ones(
    machine: Machine, path: Path
) -> None:
    """Even one move that takes longer than that; a mover ends in the midst of it as well."""
    recorded(machine, path, moves=False)
    recording = load(path)
    moved_bytes = replay(recording, configured(recording)).up_bytes
    config = configured(recording)
    round_ns = config.daemon.interval_s * config.migrate.round_percent / 100 * 1e9
    for moment in recording.moments:
        moment.page_cost_ns = round_ns / (WINDOW_PAGES / 3)
    found = replay(recording, config)
    assert found.up_bytes > moved_bytes / 2


def test_each_moment_moves_at_the_cost_it_had(path: Path) -> None:
    """As of a guest, whose host held moves up now and then; the median passes over that."""
    recorded(Machine(fast_bytes=24 * MIB), path)
    recording = load(path)
    moved, *rest = [moment for moment in recording.moments if moment.took_ns]
    assert {moved.took_ns, *(moment.took_ns for moment in rest)} == {MOVE_NS}
    assert len(rest) < len(recording.moments) / 2, "most moved nothing"
    before = replay(recording, configured(recording))
    assert before.hit_ratio > 0.5
    for moment in recording.moments:
        moment.took_ns = 1e9
    held_up = replay(recording, configured(recording))
    assert held_up.hit_ratio == 0
    for moment in recording.moments:
        moment.took_ns = 0
    found = replay(recording, configured(recording))
    assert found.hit_ratio == pytest.approx(before.hit_ratio, abs=0.01)


def test_a_look_at_single_pages_is_replayed(path: Path) -> None:
    """Every second page is hot, which one snapshot tells; there is room for these alone."""
    edges = np.arange(PAGES + 1)
    looked = replace(snapshot(edges, [20, 0] * (PAGES // 2), at_s=3.1), zoomed=True)
    blind = [snapshot([0, PAGES], [15], at_s=number * AGGREGATION_S) for number in range(100)]
    seen = sorted([*blind, looked], key=lambda accesses: accesses.at_s)
    machine = Machine(fast_bytes=PAGES * PAGE_BYTES * 5 // 8)
    machine.start(HOT, Memory(SPAN))
    with recording_to(path, most_bytes=4 << 20) as recorder:
        daemon = machine.daemon(FakeSampler(seen, machine))
        daemon.record = recorder
        machine.rounds(daemon, SECONDS)
    assert machine.memory[HOT].rank[::2].tolist().count(DRAM) >= 0.9 * PAGES / 2
    recording = load(path)
    assert [accesses.zoomed for m in recording.moments for accesses in m.seen].count(True) == 1
    found = replay(recording, configured(recording))
    last = found.at_s > SECONDS - 5
    assert found.hits[last, 0].min() >= 0.9
    assert found.optimum[last].min() >= 0.99


def test_a_recording_that_moved_nothing_replays_as_one_that_did(path: Path, tmp_path: Path) -> None:
    recorded(Machine(fast_bytes=24 * MIB), path)
    idle = tmp_path / "idle.tierd"
    recorded(Machine(fast_bytes=24 * MIB), idle, moves=False)
    moved, observed = load(path), load(idle)
    config = configured(moved)
    assert replay(observed, config).hit_ratio == pytest.approx(
        replay(moved, config).hit_ratio, abs=0.03
    )


def test_tenants_are_replayed(path: Path) -> None:
    """Two that are as hot, of which one comes first; and by a file of policy a third."""
    machine = Machine(fast_bytes=36 * MIB)
    for pid, cgroup in ((HOT, "/etl"), (OTHER, "/web")):
        machine.start(pid, Memory(SPAN))
        machine.processes[-1] = replace(machine.processes[-1], cgroup=cgroup)
    content = '[[tenant]]\ncgroup = "/web"\nclass = "latency"\nguaranteed_mib = { dram = 8 }\n'
    config = parse(content, "f")
    with recording_to(path, most_bytes=1 << 20) as recorder:
        daemon = machine.daemon(FakeSampler(half_hot(50), machine), config)
        daemon.record = recorder
        machine.rounds(daemon, 20)
    recording = load(path)
    found = replay(recording, configured(recording))
    moved = sum(machine.mover.moved) * PAGE_BYTES
    assert found.up_bytes + found.down_bytes == pytest.approx(moved, rel=0.02)
    (web,) = configured(recording).tenants
    assert (web.cgroup, web.class_) == ("/web", TenantClass.LATENCY)
    assert web.guaranteed_mib == {"dram": 8}
    added = Document("f", "", {"tenant": [{"cgroup": "/db"}]})
    assert [each.cgroup for each in configured(recording, [added]).tenants] == ["/web", "/db"]


def test_policies_differ(path: Path) -> None:
    recorded(Machine(fast_bytes=24 * MIB), path)
    recording = load(path)
    observe = configured(recording, [Document("observe", "", {"policy": {"mode": "observe"}})])
    still, moved = replay(recording, observe), replay(recording, configured(recording))
    assert (still.up_bytes, still.down_bytes, still.hit_ratio) == (0, 0, 0.0)
    assert still.slowdown == pytest.approx(2.0)
    assert moved.hit_ratio > 0.6
    assert still.best_ratio == pytest.approx(moved.best_ratio, abs=0.05)


def test_more_fast_memory_is_no_worse(path: Path) -> None:
    recorded(Machine(fast_bytes=24 * MIB), path)
    recording = load(path)
    config = configured(recording)
    ratios = [replay(recording, config, fast_bytes=size * MIB).hit_ratio for size in (4, 16, 64)]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 0.9


def test_processes_come_and_go(path: Path) -> None:
    machine = Machine()
    machine.start(HOT, Memory(SPAN))
    with recording_to(path, most_bytes=1 << 20) as recorder:
        daemon = machine.daemon(FakeSampler(half_hot(100), machine))
        daemon.record = recorder
        machine.rounds(daemon, 8)
        machine.start(OTHER, Memory(SPAN))
        machine.rounds(daemon, 8)
        machine.end(HOT)
        machine.rounds(daemon, 8)
        machine.start(HOT, Memory(SPAN), start_ticks=2)
        machine.rounds(daemon, 8)
    kinds = [frame.kind for frame in read(path) if frame.kind in (Kind.TARGET, Kind.GONE)]
    assert kinds == [Kind.TARGET, Kind.TARGET, Kind.GONE, Kind.TARGET]
    recording = load(path)
    found = replay(recording, configured(recording))
    assert found.up_bytes == pytest.approx(3 * 32 * MIB, rel=0.1)


def test_tiers_come_and_go(path: Path) -> None:
    machine = Machine()
    machine.start(HOT, Memory(SPAN))
    whole = machine.topology
    fast, slow = whole.tiers
    slow_alone = replace(whole, tiers=(replace(slow, rank=fast.rank),))
    with recording_to(path, most_bytes=1 << 20) as recorder:
        daemon = machine.daemon(FakeSampler(half_hot(100), machine))
        daemon.record = recorder
        for topology in (slow_alone, whole, slow_alone):
            machine.topology = topology
            daemon.retier(topology, daemon.mover)
            machine.rounds(daemon, 8)
    recording = load(path)
    found = replay(recording, configured(recording))
    assert found.hits.shape == (len(found.at_s), 2)
    assert found.up_bytes == 32 * MIB


def test_a_recording_ends_where_it_would_be_too_large(
    machine: Machine, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.start(HOT, Memory(SPAN))
    with recording_to(path, most_bytes=1 << 12) as recorder:
        daemon = machine.daemon(FakeSampler(half_hot(500), machine))
        daemon.record = recorder
        machine.rounds(daemon, 100)
        assert recorder.ended is not None
    assert path.stat().st_size == recorder.bytes <= 1 << 12
    assert caplog.text.count("the recording ends") == 1
    assert 5 < load(path).seconds < 90


def test_a_full_disk_ends_the_recording_and_not_the_daemon(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.start(HOT, Memory(SPAN))
    with Path("/dev/full").open("wb", buffering=0) as full:
        daemon = machine.daemon(FakeSampler(half_hot(50), machine))
        daemon.record = Recorder(full.write, most_bytes=1 << 20)
        machine.rounds(daemon, 10)
    assert daemon.rounds == 10
    assert "the recording ends: No space left on device" in caplog.text


def test_a_recording_that_nobody_fetches_ends(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(200), machine))
    daemon.record = recordings = Recordings(None, machine.monotonic)
    number = recordings.begin()
    machine.rounds(daemon, 20)
    data, ended = recordings.fetch(number)
    assert (len(data) > 1000, ended) == (True, None)
    machine.rounds(daemon, 40)
    with pytest.raises(NotFound):
        recordings.fetch(number)


def test_what_waits_to_be_fetched_is_bounded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd.recorder.WAITING_BYTES", 2048)
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(200), machine))
    daemon.record = recordings = Recordings(None, machine.monotonic)
    number = recordings.begin()
    machine.rounds(daemon, 20)
    data, ended = recordings.fetch(number)
    assert (len(data) <= 2048, ended) == (True, "it was not fetched in time")


def test_a_recording_is_its_owners_alone_and_takes_no_ones_place(path: Path) -> None:
    with recording_to(path, most_bytes=1):
        assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TierdError, match="is there already"), recording_to(path, most_bytes=1):
        pass


PLACES = Kind.PLACES.dtype
BEGIN = {
    **dict.fromkeys(("tierd", "kernel", "time"), "x"),
    "tiers": [{"name": "dram", "kind": "dram", "latency_ns": None}],
    "config": {},
}


def a_round(at_s: float, rooms: int = 1, **more: Any) -> Frame:
    text = {"at_s": at_s, "page_cost_ns": 1.0, **more}
    return Frame(kind=Kind.ROUND, text=text, rows=np.zeros(rooms, Kind.ROUND.dtype))


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ([a_round(1.0, rooms=2)], "ROUND lacks a row for each tier"),
        ([a_round(2.0), a_round(1.0)], "ROUND lacks an instant that is not before the last"),
        ([a_round(float("nan"))], "ROUND lacks an instant"),
        ([a_round(1.0, took_ns=-1)], "ROUND lacks costs that make sense"),
        ([a_round(1.0, aside_bytes=[1, 2])], "ROUND lacks what is aside of each tier"),
        ([a_round(1.0, aside_bytes=[-1])], "ROUND lacks sizes that make sense"),
    ],
)
def test_rounds_that_make_no_sense_are_named(path: Path, rounds: list[Frame], message: str) -> None:
    frames = [Frame(kind=Kind.BEGIN, text=BEGIN), *rounds]
    path.write_bytes(preamble() + b"".join(map(encode, frames)))
    with pytest.raises(BadRecording, match=message):
        load(path)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Frame(kind=Kind.ROUND, text={"at_s": 1.0}), "ROUND lacks 'page_cost_ns'"),
        (Frame(kind=Kind.TARGET), "TARGET lacks 'pid'"),
        (Frame(kind=Kind.BEGIN, text={"tiers": 5}), "BEGIN lacks"),
        (
            Frame(
                kind=Kind.MAPPED,
                text={"pid": 1},
                rows=np.array([(8, 9), (4, 5)], Kind.MAPPED.dtype),
            ),
            "ranges in order",
        ),
        (
            Frame(kind=Kind.ROUND, text={"at_s": 1.0, "page_cost_ns": 1.0}),
            "ROUND lacks a beginning before it",
        ),
        (
            Frame(kind=Kind.ROUND, text={"at_s": 1.0, "page_cost_ns": 1.0, "aside_bytes": 5}),
            "not iterable",
        ),
        (Frame(kind=Kind.TARGET, text={"pid": 5}), "TARGET lacks 'command'"),
        (Frame(kind=Kind.BEGIN, text={**BEGIN, "config": []}), "BEGIN lacks a configuration"),
        (
            Frame(kind=Kind.BEGIN, text={**BEGIN, "kernel": 5, "tiers": []}),
            "as many rooms as tiers",
        ),
        (
            Frame(kind=Kind.PLACES, text={"pid": 1}, rows=np.array([(1, 2, -1.0)], PLACES)),
            "shares from 0 to 1",
        ),
    ],
)
def test_frames_that_make_no_sense_are_named(path: Path, frame: Frame, message: str) -> None:
    path.write_bytes(preamble() + encode(frame))
    with pytest.raises(BadRecording, match=message):
        load(path)


def tierctl(*arguments: "str | os.PathLike[str]") -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def the_document(*arguments: "str | os.PathLike[str]") -> dict[str, Any]:
    result = tierctl(*arguments, "--json")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.output)
    return document


def test_policies_are_compared_in_a_table(path: Path, tmp_path: Path) -> None:
    recorded(Machine(fast_bytes=24 * MIB), path)
    still = tmp_path / "still.toml"
    still.write_text('[policy]\nmode = "observe"\n')
    picture = tmp_path / "hits.svg"
    policies = ("recorded", "capacity", still)
    options = [word for policy in policies for word in ("--policy", policy)]
    result = tierctl("replay", path, *options, "-o", picture)
    assert result.exit_code == 0, result.output
    *_, moved, slowly, idle = result.output.splitlines()
    assert moved.startswith("recorded")
    assert slowly.startswith("capacity")
    assert idle.split()[:3] == [str(still), "0.0", "%"]
    assert "<svg" in picture.read_text()


def test_the_documents_figures_are_the_tables(path: Path) -> None:
    recorded(Machine(fast_bytes=24 * MIB), path)
    told = the_document("replay", path)
    (policy,) = told["policies"]
    recording = load(path)
    assert policy["hit_ratio"] == replay(recording, configured(recording)).hit_ratio
    assert len(policy["at_s"]) == len(policy["hits"]) == len(policy["optimum"])


def test_a_size_is_recommended(path: Path, tmp_path: Path) -> None:
    recorded(Machine(fast_bytes=24 * MIB), path)
    picture = tmp_path / "size.png"
    told = the_document("size", path, "--steps", "8", "--price", "8", "3", "-o", picture)
    slowdowns = [size["slowdown"] for size in told["sizes"]]
    assert slowdowns[0] > 1.2 > 1.1 > slowdowns[-1]
    assert told["knee_bytes"] == pytest.approx(24 * MIB, abs=8 * MIB)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = tierctl("size", path, "--steps", "8", "--price", "8", "3").output
    assert text.count("knee") == text.count("cheapest") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "/nowhere/at-all"], "/nowhere/at-all: No such file"),
        (["size", "/nowhere/at-all", "--price", "0", "1"], "both have to be above 0"),
        (["replay", "/dev/null"], "no recording of tierd's"),
        (["replay", "/dev/null", "--fast", "lots"], "'lots' is no size such as 512M"),
    ],
)
def test_what_cannot_be_replayed_is_told(arguments: Sequence[str], message: str) -> None:
    result = tierctl(*arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output


def test_a_policy_that_is_wrong_is_told_with_its_line(path: Path, tmp_path: Path) -> None:
    recorded(Machine(), path)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[policy]\nhysteresis = 0\n")
    result = tierctl("replay", path, "--policy", wrong)
    assert result.exit_code == 1
    assert f"{wrong}:2: policy.hysteresis" in result.output


def test_a_damaged_end_can_be_left_out(path: Path) -> None:
    recorded(Machine(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 10])
    assert "damaged at byte" in tierctl("replay", path).output
    assert tierctl("replay", path, "--until-damage").exit_code == 0
