# SPDX-License-Identifier: Apache-2.0
"""Tenants: who is whose, what cannot be promised, and that the daemon keeps their shares."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest

from tests.unit.conftest import CXL_ERRORS
from tests.unit.machine import (
    HALF_HOT,
    HOT,
    MOVE_NS,
    OTHER,
    SPAN,
    FakeSampler,
    Machine,
    Memory,
    half_hot,
    topology,
)
from tests.unit.replay import MIB
from tierd.cli.status import as_text
from tierd.cli.top import Moment, frame
from tierd.config import Config, MigrateConfig, Place, TenantConfig
from tierd.config.show import as_dict
from tierd.discover.tenants import OTHERS, Tenants, check_tenants
from tierd.errors import ConfigError
from tierd.model import Rank

TIERS = topology(64 * MIB).tiers
FAST = Rank(0)


def tenant(
    cgroup: str,
    line: int = 1,
    *,
    guaranteed_mib: Mapping[str, float] = MappingProxyType({}),
    maximum_mib: Mapping[str, float] = MappingProxyType({}),
) -> TenantConfig:
    return TenantConfig(
        cgroup=cgroup,
        guaranteed_mib=guaranteed_mib,
        maximum_mib=maximum_mib,
        place=Place(file="f", line=line, key=""),
    )


@pytest.mark.parametrize(
    ("cgroup", "name"),
    [
        ("/db", "/db"),
        ("/db/postgres", "/db"),
        ("/db/redis", "/db/redis"),
        ("/db/redis/1", "/db/redis"),
        ("/dbx", OTHERS),
        ("/", OTHERS),
        (None, OTHERS),
    ],
)
def test_the_nearest_tenant_has_a_process(cgroup: str | None, name: str) -> None:
    tenants = Tenants([tenant("/db"), tenant("/db/redis")], TIERS)
    assert tenants.all[tenants.index(cgroup)].name == name


def test_what_is_promised_of_a_tier_that_has_gone_is_left_out() -> None:
    promised = {"dram": 16.0, "hbm": 4.0}
    (found, _) = Tenants([tenant("/db", guaranteed_mib=promised)], TIERS).all
    assert found.guaranteed_bytes == {FAST: 16 * MIB}


def test_what_cannot_be_promised_is_told() -> None:
    wanted = [
        tenant("/a", 2, guaranteed_mib={"dram": 40.0}, maximum_mib={"hbm": 1.0}),
        tenant("/b", 7, guaranteed_mib={"dram": 30.0}),
    ]
    with pytest.raises(ConfigError) as caught:
        check_tenants(wanted, TIERS)
    assert str(caught.value).splitlines() == [
        "f:2: tenant /a: maximum_mib: there is no tier hbm; there are dram, cxl",
        "f:7: tenant /b: guaranteed_mib: with this 70 MiB of dram are guaranteed, which has 64",
    ]


def test_the_daemon_keeps_shares() -> None:
    machine = Machine(fast_bytes=48 * MIB)
    machine.start(HOT, Memory(SPAN))
    machine.start(OTHER, Memory(SPAN))
    machine.processes = [
        replace(process, cgroup=cgroup)
        for process, cgroup in zip(machine.processes, ("/db/1", "/batch"), strict=True)
    ]
    config = Config(tenants=(tenant("/db", guaranteed_mib={"dram": 30.0}),))
    daemon = machine.daemon(FakeSampler(half_hot(100), machine), config)
    machine.rounds(daemon, 20)
    db, others = machine.told[-1]["tenants"]
    assert db["resident"]["dram"] == pytest.approx(31 * MIB, abs=2 * MIB)
    assert others["resident"]["dram"] == pytest.approx(16 * MIB, abs=2 * MIB)
    assert db["share"]["dram"] + others["share"]["dram"] <= 48 * MIB
    text = as_text({"pid": 1, **machine.told[-1], "config": as_dict(config), "cxl": CXL_ERRORS})
    moment = Moment(at_s=0.0, status={"pid": 1, **machine.told[-1]}, pressure=None)
    for told in (text.splitlines(), frame(moment, moment)):
        (row,) = (line.split() for line in told if line.startswith("/db") and "dram" in line)
        assert row[1:4] == ["normal", "100", "dram"]
        assert row[-3:] == ["30", "MiB", "-"]
    daemon.reconfigure(Config(), daemon.mover)
    machine.rounds(daemon, 1)
    assert machine.told[-1]["tenants"] == []


def test_a_process_that_is_put_elsewhere_changes_tenants() -> None:
    machine = Machine()
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(100), machine), Config(tenants=(tenant("/db"),)))
    machine.rounds(daemon, 4)
    assert [t["resident"]["dram"] > 0 for t in machine.told[-1]["tenants"]] == [False, True]
    machine.processes = [replace(process, cgroup="/db") for process in machine.processes]
    machine.rounds(daemon, 4)
    assert [t["resident"]["dram"] > 0 for t in machine.told[-1]["tenants"]] == [True, False]


def test_with_tenants_a_plan_is_what_a_round_has_time_for() -> None:
    """The deadline would cut off the same one in each round; 10 ms are time for 3333 pages."""
    most = []
    for tenants in ((), (tenant("/db"),)):
        machine = Machine()
        machine.start(HOT, Memory(SPAN))
        config = Config(tenants=tenants, migrate=MigrateConfig(round_percent=1.0))
        daemon = machine.daemon(FakeSampler(half_hot(100), machine), config)
        most.append(max(machine.rounds(daemon, 20)))
        assert machine.memory[HOT].share(HALF_HOT, FAST) == 1
    alone, of_several = most
    assert alone > 7000
    assert 2500 < of_several <= 0.01e9 / MOVE_NS
