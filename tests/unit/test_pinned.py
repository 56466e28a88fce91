# SPDX-License-Identifier: Apache-2.0
"""Ranges that a daemon keeps where an operator, or the configuration, wants them."""

from dataclasses import replace

import pytest

from tests.unit.machine import (
    DRAM,
    HALF_HOT,
    HOT,
    OTHER,
    SPAN,
    FakeSampler,
    Machine,
    Memory,
    half_hot,
    topology,
)
from tests.unit.replay import MIB
from tierd.config import Config, Place, TargetConfig
from tierd.daemon import Daemon
from tierd.decide.guard import Guard
from tierd.errors import NotFound
from tierd.model import Kept, Pin

COLD = range(HALF_HOT.stop, SPAN.stop)
QUARTER = range(COLD.start, COLD.start + 16 * MIB)


def placed(machine: Machine, config: Config | None = None) -> Daemon:
    """A daemon that has moved the hot half of a process to fast memory that has room for more."""
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(200), machine), config)
    machine.rounds(daemon, 8)
    return daemon


def share(machine: Machine, part: range) -> float:
    return machine.memory[HOT].share(part, DRAM)


def test_a_range_is_pinned_to_the_fastest(machine: Machine) -> None:
    daemon = placed(machine)
    assert (share(machine, HALF_HOT), share(machine, COLD)) == (1, 0)
    daemon.targets.pin(HOT, Pin.FASTEST, QUARTER)
    machine.rounds(daemon, 8)
    assert share(machine, QUARTER) == 1
    assert share(machine, range(QUARTER.stop, SPAN.stop)) == 0
    told = machine.told[-1]["targets"][0]
    assert told["pinned"] == {"fastest": len(QUARTER), "here": 0}


def test_what_is_pinned_is_no_regret(machine: Machine) -> None:
    """All that was moved in the last half minute is cold, and in the fastest tier."""
    daemon = placed(machine)
    machine.rounds(daemon, 40)
    daemon.targets.pin(HOT, Pin.FASTEST, COLD)
    machine.rounds(daemon, 20)
    assert share(machine, COLD) == 1
    assert not machine.told[-1]["targets"][0]["rests"]
    daemon.targets.pin(HOT, None, COLD)
    machine.rounds(daemon, 20)
    assert not machine.told[-1]["targets"][0]["rests"], "nor what was"


def test_a_pinned_range_makes_way_for_nobody(machine: Machine) -> None:
    machine.topology = topology(48 * MIB)
    daemon = placed(machine)
    daemon.targets.pin(HOT, Pin.FASTEST, QUARTER)
    machine.rounds(daemon, 8)
    assert share(machine, QUARTER) == 1
    assert share(machine, HALF_HOT) < 1, "hot memory made way for it"
    daemon.targets.pin(HOT, None, QUARTER)
    machine.rounds(daemon, 30)
    assert share(machine, HALF_HOT) == 1


def test_a_range_is_pinned_where_it_is(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(200), machine))
    part = range(HALF_HOT.start + 8 * MIB, HALF_HOT.start + 16 * MIB)
    machine.look(daemon)
    daemon.targets.pin(HOT, Pin.HERE, part)
    machine.rounds(daemon, 10)
    assert share(machine, part) == 0
    assert share(machine, range(part.stop, HALF_HOT.stop)) == 1
    assert machine.told[-1]["kept"][Kept.PINNED] == len(part)
    daemon.targets.pin(HOT, None)
    machine.rounds(daemon, 10)
    assert share(machine, HALF_HOT) == 1
    assert daemon.targets.pins(HOT) == []


def test_a_range_holds_before_its_process(machine: Machine) -> None:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(200), machine))
    machine.look(daemon)
    daemon.targets.pin(HOT, Pin.FASTEST, QUARTER)
    daemon.targets.pin(HOT, Pin.HERE)
    machine.rounds(daemon, 10)
    assert share(machine, QUARTER) == 1
    assert share(machine, HALF_HOT) == 0


def test_a_range_ends_with_its_memory(machine: Machine) -> None:
    daemon = placed(machine)
    daemon.targets.pin(HOT, Pin.HERE, QUARTER)
    machine.memory[HOT] = Memory(range(SPAN.start, QUARTER.start + MIB))
    machine.rounds(daemon, 4)
    (left,) = daemon.targets.pins(HOT)
    assert (left["start"], left["end"]) == (QUARTER.start, QUARTER.start + MIB)


def test_the_rest_of_a_process_rests_without_its_pinned_range(machine: Machine) -> None:
    daemon = placed(machine)
    daemon.targets.pin(HOT, Pin.FASTEST, QUARTER)
    daemon.watched[HOT].guard = Guard(rests_until_s=float("inf"))
    machine.rounds(daemon, 8)
    assert share(machine, QUARTER) == 1, "who pinned it knows better"


def test_a_process_that_has_ended_has_nothing_to_pin(machine: Machine) -> None:
    daemon = placed(machine)
    machine.end(HOT)
    with pytest.raises(NotFound, match="has ended"):
        daemon.targets.pin(HOT, Pin.HERE, QUARTER)


def rule(pin: dict[str, Pin], **marks: str) -> TargetConfig:
    return TargetConfig(pin=pin, place=Place(file="f", line=1, key=""), **marks)  # type: ignore[arg-type]


def test_mappings_are_pinned_by_their_names(machine: Machine) -> None:
    machine.names[HOT] = {"[heap]": QUARTER, "/other": range(QUARTER.stop, SPAN.stop)}
    config = Config(
        targets=(
            rule({"/other": Pin.FASTEST}, command="another"),
            rule({"[heap]": Pin.HERE}, command="hotset"),
            rule({"[heap]": Pin.FASTEST, "/none": Pin.HERE}, user="0"),
        )
    )
    daemon = placed(machine, config)
    assert share(machine, QUARTER) == 1
    assert share(machine, range(QUARTER.stop, SPAN.stop)) == 0
    (told,) = daemon.targets.pins(HOT)
    assert (told["pin"], told["by"]) == ("fastest", "configuration")
    grown = range(QUARTER.start, QUARTER.stop + MIB)
    machine.names[HOT] = {"[heap]": grown}
    machine.rounds(daemon, 8)
    assert share(machine, grown) == 1, "it follows its mapping"
    daemon.targets.pin(HOT, Pin.HERE, grown)
    assert [each["by"] for each in daemon.targets.pins(HOT)] == ["operator", "configuration"]
    assert daemon.watched[HOT].pinned_bytes() == {"fastest": 0, "here": len(grown)}
    daemon.targets.pin(HOT, None)
    daemon.watched[HOT].look_at_s = machine.now_s + 60
    daemon.reconfigure(Config(), daemon.mover)
    machine.rounds(daemon, 1)
    assert daemon.targets.pins(HOT) == []


def test_a_pin_by_pid_is_of_that_process(machine: Machine) -> None:
    machine.names = {pid: {"[heap]": QUARTER} for pid in (HOT, OTHER)}
    machine.start(OTHER, Memory(SPAN))
    of_pid = TargetConfig(
        pid=OTHER, pin={"[heap]": Pin.HERE}, place=Place(file="f", line=1, key="")
    )
    daemon = placed(machine, replace(Config(), targets=(of_pid,)))
    assert [len(daemon.targets.pins(pid)) for pid in (HOT, OTHER)] == [0, 1]
