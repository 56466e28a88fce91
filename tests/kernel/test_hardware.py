# SPDX-License-Identifier: Apache-2.0
"""Sampling of all CPUs on the running kernel, by page faults: hardware's path without a PMU."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.kernel.test_accesses import PAGES, buffer, touch
from tests.unit.replay import Replay, recorded
from tests.unit.test_nodes import write
from tierd.config import HardwareConfig, Samples
from tierd.kernel import pmu
from tierd.model import PAGE_BYTES, Pid
from tierd.sample import hardware
from tierd.sample.fused import Fused, with_hardware
from tierd.sample.hardware import Hardware
from tierd.sample.sampler import Sampler

OWN, OTHER = Pid(os.getpid()), Pid(1)
CPUS = sorted(os.sched_getaffinity(0))


def damon() -> Sampler:
    return Replay(recorded(), time.monotonic)


def every_fault(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    monkeypatch.setattr(hardware, "FIRST_TIMES", 1)
    return Hardware(pmu.page_faults(), CPUS, cpu_percent=10.0)


def test_the_pages_of_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = every_fault(monkeypatch)
    try:
        with buffer() as (address, memory):
            touch(memory)
            found = sampler.read([OWN, OTHER])
    finally:
        sampler.close()
    expected = address + np.arange(PAGES) * PAGE_BYTES
    assert set(expected.tolist()) <= set(found[OWN]["page"].tolist())
    assert not set(expected.tolist()) & set(found[OTHER]["page"].tolist())
    assert set(found[OWN]["weight"].tolist()) == {1.0}, "a fault may be for a load or a store"
    assert sampler.sampling.samples >= len(expected)


def test_the_period_follows_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "ADJUST_S", 0.1)
    sampler = every_fault(monkeypatch)  # its rings hold what other programs fault meanwhile, too
    sampler.most_per_s = 200.0
    try:
        assert sampler.sampling.period == 1
        with buffer(4096) as (_, memory):
            touch(memory)
        assert periods(sampler, 1) == [hardware.STEP]
        sampler.most_per_s = 1e9
        assert periods(sampler, 6)[-1] == 1, "and back when there is room for more"
    finally:
        sampler.close()


def periods(sampler: Hardware, count: int) -> list[int]:
    """The periods after so many adjustments."""
    found = []
    for _ in range(count):
        time.sleep(hardware.ADJUST_S)
        sampler.read([OWN])
        found.append(sampler.sampling.period)
    return found


def test_page_faults_are_sampled_where_that_is_asked_for() -> None:
    sampler = with_hardware(damon(), HardwareConfig(samples=Samples.PAGE_FAULTS))
    try:
        assert isinstance(sampler, Fused)
        assert sampler.sampling is not None
        assert sampler.sampling.source == "page-faults"
    finally:
        sampler.close()


def test_what_cannot_be_sampled_leaves_damon_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tierd")
    alone = damon()
    assert with_hardware(alone, HardwareConfig(samples=Samples.OFF), tmp_path) is alone
    assert not caplog.messages
    assert with_hardware(alone, HardwareConfig(), tmp_path) is alone
    assert "no event that tells addresses" in caplog.text
    ibs = tmp_path / pmu.DEVICES / pmu.AMD
    write(tmp_path, {f"{pmu.DEVICES}/{pmu.AMD}/type": f"{2**31 - 1}\n"})
    write(tmp_path, {"sys/devices/system/cpu/online": f"{CPUS[0]}\n"})
    assert with_hardware(alone, HardwareConfig(), tmp_path) is alone
    assert "perf_event_open" in caplog.text
    (ibs / "type").write_text("many\n")
    assert with_hardware(alone, HardwareConfig(), tmp_path) is alone
    assert "not a number" in caplog.text
