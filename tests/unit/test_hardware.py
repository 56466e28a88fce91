# SPDX-License-Identifier: Apache-2.0
"""What samples of a PMU tell, from the bytes of a ring on.

No machine of ours has a PMU: the samples are made up, by what the kernel's tables of data sources
hold, and go through the real decoder.
"""

import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.replay import Replay, recorded
from tests.unit.test_accesses import Access
from tests.unit.test_nodes import write
from tests.unit.test_pmu import ARM, NEOVERSE_V2, midr
from tests.unit.test_ring import captured
from tests.unit.test_spe import Operation
from tierd.config import HardwareConfig
from tierd.kernel import accesses
from tierd.kernel.accesses import ACCESS, Event
from tierd.kernel.pmu import Source
from tierd.model import Pid
from tierd.sample import hardware
from tierd.sample.fused import Fused, with_hardware
from tierd.sample.hardware import Hardware

GIB = 1 << 30
LOAD_HIT = 0x2 | 0x2 << 5
SOURCES = {
    "Intel, local memory": (LOAD_HIT | 0x80 << 5 | 0xD << 33, True),
    "Intel, remote memory, numbered L3": (LOAD_HIT | 0x100 << 5 | 0x3 << 33 | 1 << 37, True),
    "Intel, persistent memory": (LOAD_HIT | 0xE << 33, True),
    "Intel, L3": (LOAD_HIT | 0x40 << 5 | 0x3 << 33, False),
    "Intel, a fill buffer": (LOAD_HIT | 0x10 << 5 | 0xC << 33, False),
    "Intel, another socket's cache": (LOAD_HIT | 0x400 << 5 | 0x3 << 33 | 1 << 37, False),
    "Intel, missed L3, by what is unknown": (0x2 | 0x4 << 5 | 0x3 << 33, False),
    "Intel, a store that missed L1": (0x4 | 0x4 << 5 | 0x8 << 5, False),
    "AMD, local memory": (LOAD_HIT | 0x80 << 5 | 0xD << 33, True),
    "AMD before 6.12, local memory": (LOAD_HIT | 0x80 << 5, True),
    "AMD, CXL": (0x2 | 0x9 << 33, True),
    "AMD, another cache": (LOAD_HIT | 0x400 << 5 | 0xB << 33, False),
    "nothing known": (0x1 | 0x1 << 5 | 0xF << 33, False),
    "AMD, a store": (0x4 | 0x80 << 5 | 0x2 << 5 | 0xD << 33, False),
    "page faults": (0, False),
}
"""What kernels tell of samples: union perf_mem_data_src by what it is of, and whether of memory."""


@pytest.mark.parametrize("name", SOURCES)
def test_what_memory_served_is_told_from_what_a_cache_did(name: str) -> None:
    source, of_memory = SOURCES[name]
    found = np.zeros(1, ACCESS)
    found["source"] = source
    assert accesses.served_by_memory(found).tolist() == [of_memory]


class FakeRing:
    """Stands for a CPU's ring: bytes as the kernel would write them, decoded as the real ones."""

    written = b""
    lost = throttled = 0

    def __init__(self, event: Event, *, cpu: int, samples: int, wakeup_samples: int) -> None:
        self.event, self.cpu, self.samples = event, cpu, samples

    def read(self) -> NDArray[np.void]:
        stream, FakeRing.written = FakeRing.written, b""
        data, into = captured(stream, 0, 1 << 17), np.empty(2000, ACCESS)
        if self.event.spe:
            sources, head = self.event.spe_sources, len(stream)
            got = accesses.decode_packets(data, head=head, tail=0, into=into, sources=sources)
            return got.records
        return accesses.decode(data, head=len(stream), tail=0, into=into).records

    def set_period(self, period: int) -> None:
        self.period = period

    def __enter__(self) -> "FakeRing":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def fake_pmu(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    monkeypatch.setattr(hardware, "AccessRing", FakeRing)
    event = Event(type=4, config=0x1CD, period=1)
    return Hardware(Source(name="fake", event=event, least_period=1000), [0], cpu_percent=100.0)


def sampled(source: int, phys_addr: int, cycles: int, pid: int = 640) -> bytes:
    return Access(pid, pid, 7, 0x7F00_0000_1234, cycles, source, phys_addr).encode()


def test_a_rings_loads_come_through_with_place_and_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    pmu = fake_pmu(monkeypatch)
    memory, cache = SOURCES["Intel, local memory"][0], SOURCES["Intel, L3"][0]
    FakeRing.written = b"".join(
        [
            sampled(memory, 0x1000, 310),
            sampled(cache, 0x1000, 60),
            sampled(memory, 0, 300),
            sampled(memory, GIB, 700, pid=1),
        ]
    )
    pages = pmu.read([Pid(640)])
    assert pmu.loads.tolist() == [(0x1000, 310), (GIB, 700)], "of all processes"
    assert len(pages[Pid(640)]) == 3, "what a cache served is an access too"
    pmu.read([Pid(640)])
    assert not len(pmu.loads), "once"


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_a_store_counts_as_configured(monkeypatch: pytest.MonkeyPatch, weight: float) -> None:
    pmu = fake_pmu(monkeypatch)
    pmu.write_weight = weight
    names = "AMD, local memory", "AMD, a store", "Intel, a store that missed L1", "nothing known"
    FakeRing.written = b"".join(sampled(SOURCES[name][0], 0, 1) for name in names)
    hits = pmu.read([Pid(640)])[Pid(640)]
    assert hits["weight"].tolist() == [1, weight, weight, 1]
    assert set(hits["page"].tolist()) == {0x7F00_0000_1000}


# Arm's SPE, which tells threads


def fake_spe(monkeypatch: pytest.MonkeyPatch, root: Path) -> Hardware:
    monkeypatch.setattr(hardware, "AccessRing", FakeRing)
    event = Event(type=13, config=0, period=1, spe=True, spe_sources=True)
    source = Source(name="fake", event=event, least_period=1000, cpus=(0,))
    return Hardware(source, [0], cpu_percent=100.0, write_weight=2.5, root=root)


def thread(tid: int, leader: int) -> dict[str, str]:
    return {f"proc/{tid}/status": f"Name:\tredis\nTgid:\t{leader}\nPid:\t{tid}\n"}


def accessed(tid: int, addr: int, *, store: bool = False) -> bytes:
    return Operation(tid, addr, 0x1000, 310, store=store, source=0xE).encode()


def test_threads_accesses_are_their_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path, thread(640, 640) | thread(641, 640) | thread(7, 7))
    spe = fake_spe(monkeypatch, tmp_path)
    FakeRing.written = b"".join(
        [
            accessed(640, 0x1234),
            accessed(641, 0x2234, store=True),
            accessed(7, 0x3234),
            accessed(642, 0x4234),
            accessed(0, 0x5234),
        ]
    )
    hits = spe.read([Pid(640), Pid(1)])
    assert hits[Pid(640)]["page"].tolist() == [0x1000, 0x2000]
    assert hits[Pid(640)]["weight"].tolist() == [1, 2.5]
    assert not len(hits[Pid(1)])
    assert spe.loads.tolist() == [(0x1000, 310)] * 4, "of all processes, gone ones too"
    assert (spe.sampling.samples, spe.sampling.unowned) == (5, 2)


@pytest.mark.parametrize(("namespace", "unowned"), [(4026531836, 0), (4026532000, 1)])
def test_within_a_namespace_threads_have_other_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, namespace: int, unowned: int
) -> None:
    write(tmp_path, thread(641, 640))
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
    spe = fake_spe(monkeypatch, tmp_path)
    FakeRing.written = accessed(641, 0x1234)
    spe.read([Pid(640)])
    assert spe.sampling.unowned == unowned


def test_whose_a_thread_is_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, thread(641, 640))
    spe = fake_spe(monkeypatch, tmp_path)
    found = []
    for leader, owners_s in ((640, 10.0), (700, 10.0), (700, 0.0)):
        write(tmp_path, thread(641, leader))
        monkeypatch.setattr(hardware, "OWNERS_S", owners_s)
        FakeRing.written = accessed(641, 0x1234)
        found.append([pid for pid, hits in spe.read([Pid(640), Pid(700)]).items() if len(hits)])
    assert found == [[640], [640], [700]]


def test_only_cpus_that_have_the_event_are_sampled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[FakeRing] = []

    def open_ring(event: Event, *, cpu: int, samples: int, wakeup_samples: int) -> FakeRing:
        opened.append(FakeRing(event, cpu=cpu, samples=samples, wakeup_samples=wakeup_samples))
        return opened[-1]

    monkeypatch.setattr(hardware, "AccessRing", open_ring)
    write(tmp_path, ARM | midr(1, NEOVERSE_V2) | {"sys/devices/system/cpu/online": "1-3\n"})
    fused = with_hardware(Replay(recorded(), time.monotonic), HardwareConfig(), tmp_path)
    assert isinstance(fused, Fused)
    assert [(ring.cpu, ring.event.spe_sources) for ring in opened] == [(1, True)]
    fused.close()
