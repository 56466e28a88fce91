# SPDX-License-Identifier: Apache-2.0
"""The event that tells addresses, by what kernels have in sysfs on Intel's and AMD's machines."""

from pathlib import Path

import pytest

from tests.unit.test_nodes import write
from tierd.kernel import pmu
from tierd.kernel.accesses import Event
from tierd.kernel.pmu import Nothing, Source
from tierd.kernel.text import UnexpectedContent

CPU, CORE, IBS = (f"{pmu.DEVICES}/{name}" for name in ("cpu", "cpu_core", "ibs_op"))
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
    source = found(tmp_path, hybrid)
    assert isinstance(source, Source)
    assert source.name == "cpu_core/mem-loads"


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


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({f"{pmu.DEVICES}/arm_spe_0/type": "9\n"}, "SPE"),
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
