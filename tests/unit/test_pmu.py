# SPDX-License-Identifier: Apache-2.0
"""The event that tells addresses, by what kernels have in sysfs on machines of each kind."""

from pathlib import Path

import pytest

from tests.unit.test_nodes import write
from tierd.kernel import pmu
from tierd.kernel.accesses import Event
from tierd.kernel.pmu import Nothing, Source
from tierd.kernel.text import UnexpectedContent

CPU, CORE, IBS = (f"{pmu.DEVICES}/{name}" for name in ("cpu", "cpu_core", "ibs_op"))
SPE, OTHER_SPE = f"{pmu.DEVICES}/arm_spe_0", f"{pmu.DEVICES}/arm_spe_1"
FORMAT = {
    "event": "config:0-7\n",
    "umask": "config:8-15,40-47\n",
    "ldlat": "config1:0-15\n",
}
ICELAKE = {
    f"{CPU}/type": "4\n",
    f"{CPU}/caps/max_precise": "3\n",
    f"{CPU}/events/mem-loads": "event=0xcd,umask=0x1,ldlat=3\n",
    **{f"{CPU}/format/{name}": content for name, content in FORMAT.items()},
}
SAPPHIRE_RAPIDS = ICELAKE | {f"{CPU}/events/mem-loads-aux": "event=0x03,umask=0x82\n"}
ZEN2 = {f"{IBS}/type": "11\n", f"{IBS}/format/cnt_ctl": "config:19\n"}
ZEN4 = ZEN2 | {f"{IBS}/format/l3missonly": "config:16\n"}
ARM = {
    f"{SPE}/type": "13\n",
    f"{SPE}/cpumask": "0-1\n",
    f"{SPE}/caps/min_interval": "1024\n",
    f"{SPE}/format/ts_enable": "config:0\n",
    f"{SPE}/format/pa_enable": "config:1\n",
    f"{SPE}/format/jitter": "config:16\n",
    f"{SPE}/format/load_filter": "config:33\n",
    f"{SPE}/format/store_filter": "config:34\n",
    f"{SPE}/format/min_latency": "config2:0-11\n",
}
NEOVERSE_V2, CORTEX_A76 = "0x00000000410fd4f0\n", "0x00000000414fd0b1\n"


def midr(cpu: int, content: str) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{cpu}/regs/identification/midr_el1": content}


def found(root: Path, tree: dict[str, str]) -> Source | Nothing:
    write(root, tree)
    return pmu.find(root)


def test_loads_from_a_latency_on(tmp_path: Path) -> None:
    source = found(tmp_path, ICELAKE)
    assert source == Source(
        name="cpu/mem-loads",
        event=Event(type=4, config=0x1CD, config1=64, period=1, precise=3),
        least_period=1000,
    )


def test_newer_cores_want_a_leader(tmp_path: Path) -> None:
    source = found(tmp_path, SAPPHIRE_RAPIDS)
    assert isinstance(source, Source)
    assert source.event.leader == 0x8203


def test_of_two_kinds_of_cores_the_faster_ones_are_sampled(tmp_path: Path) -> None:
    hybrid = {path.replace(CPU, CORE): content for path, content in ICELAKE.items()}
    source = found(tmp_path, hybrid | {f"{CORE}/cpus": "0-7\n"})
    assert isinstance(source, Source)
    assert source.name == "cpu_core/mem-loads"
    assert source.cpus == tuple(range(8))


@pytest.mark.parametrize(
    ("tree", "config", "least_period"), [(ZEN2, 1 << 19, 1 << 16), (ZEN4, 9 << 16, 1 << 12)]
)
def test_operations_and_where_it_can_only_misses(
    tmp_path: Path, tree: dict[str, str], config: int, least_period: int
) -> None:
    assert found(tmp_path, tree) == Source(
        name="ibs_op",
        event=Event(type=11, config=config, period=1, excludes_kernel=False),
        least_period=least_period,
    )


def test_of_arm_what_took_long_without_time_or_place(tmp_path: Path) -> None:
    source = found(tmp_path, ARM)
    config = 1 << 16 | 1 << 33 | 1 << 34
    assert source == Source(
        name="arm_spe_0",
        event=Event(type=13, config=config, config2=64, period=1, spe=True),
        least_period=1024,
        cpus=(0, 1),
    )


@pytest.mark.parametrize(
    ("cores", "told"),
    [
        (midr(0, NEOVERSE_V2), True),
        (midr(0, NEOVERSE_V2) | midr(1, NEOVERSE_V2), True),
        (midr(0, NEOVERSE_V2) | midr(1, CORTEX_A76), False),
        (midr(0, CORTEX_A76), False),
        (midr(2, NEOVERSE_V2), False),
    ],
)
def test_physical_addresses_only_where_memory_is_told_from_caches(
    tmp_path: Path, cores: dict[str, str], *, told: bool
) -> None:
    source = found(tmp_path, ARM | cores)
    assert isinstance(source, Source)
    assert source.event.spe_sources == told
    assert bool(source.event.config & 1 << 1) == told


def test_of_two_kinds_of_arms_cores_the_first_are_sampled(tmp_path: Path) -> None:
    other = {path.replace(SPE, OTHER_SPE): content for path, content in ARM.items()}
    source = found(tmp_path, other | ARM | {f"{OTHER_SPE}/cpumask": "2-3\n"})
    assert isinstance(source, Source)
    assert (source.name, source.cpus) == ("arm_spe_0", (0, 1))


def test_an_spe_that_tells_no_interval_has_the_longest(tmp_path: Path) -> None:
    source = found(tmp_path, ARM | {f"{SPE}/caps/min_interval": "0\n"})
    assert isinstance(source, Source)
    assert source.least_period == 4096


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({f"{CPU}/type": "4\n"}, "no event"),
        ({}, "no event"),
    ],
)
def test_without_one_it_says_why(tmp_path: Path, tree: dict[str, str], why: str) -> None:
    source = found(tmp_path, tree)
    assert isinstance(source, Nothing)
    assert why in source.why


def test_bits_may_lie_apart(tmp_path: Path) -> None:
    wide = ICELAKE | {f"{CPU}/events/mem-loads": "event=0xcd,umask=0x101\n"}
    source = found(tmp_path, wide)
    assert isinstance(source, Source)
    assert source.event.config == 1 << 40 | 0x1CD


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (f"{SPE}/cpumask", "all"),
        (f"{SPE}/format/min_latency", "config3:0-11"),
        (f"{SPE}/format/load_filter", ""),
        (f"{SPE}/type", ""),
    ],
)
def test_what_an_spe_has_otherwise_is_named(tmp_path: Path, path: str, content: str) -> None:
    with pytest.raises(UnexpectedContent, match="not "):
        found(tmp_path, ARM | {path: content})


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (f"{CPU}/events/mem-loads", "event=zero"),
        (f"{CPU}/events/mem-loads", "event=0xcd,,"),
        (f"{CPU}/events/mem-loads", "event=0xcd,frontend=1"),
        (f"{CPU}/format/ldlat", "config4:0-15"),
        (f"{CPU}/format/ldlat", "config1:0-99999999999"),
        (f"{CPU}/format/ldlat", ""),
        (f"{CPU}/type", "many"),
        (f"{CPU}/type", ""),
    ],
)
def test_what_is_not_as_documented_is_named(tmp_path: Path, path: str, content: str) -> None:
    with pytest.raises(UnexpectedContent, match="not "):
        found(tmp_path, ICELAKE | {path: content})
