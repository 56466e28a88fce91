# SPDX-License-Identifier: Apache-2.0
"""Which event of this machine's CPUs tells the addresses of accesses, as sysfs offers it.

Follows Documentation/ABI/testing/sysfs-bus-event_source-devices-{events,format,caps}. A PMU says
where in perf_event_attr its terms go, and what some events are made of:

    /sys/bus/event_source/devices/cpu/type                  4
    /sys/bus/event_source/devices/cpu/format/ldlat          config1:0-15
    /sys/bus/event_source/devices/cpu/events/mem-loads      event=0xcd,umask=0x1,ldlat=3
    /sys/bus/event_source/devices/cpu/events/mem-loads-aux  event=0x03,umask=0x82
    /sys/bus/event_source/devices/cpu/caps/max_precise      3

Intel's loads are sampled from a latency on, so that most hits of the first caches are left out;
newer cores want the auxiliary event as the group's leader. Their mem-stores is left alone, since it
counts what the caches take too (docs/placement.md). AMD's IBS samples operations of any kind; where
it can (Zen 4) only those that missed the last cache. What was no access has no address.

Arm's SPE follows drivers/perf/arm_spe_pmu.c and tools/perf/arch/arm64/util/arm-spe.c:

    /sys/bus/event_source/devices/arm_spe_0/type                13
    /sys/bus/event_source/devices/arm_spe_0/cpumask             0-71
    /sys/bus/event_source/devices/arm_spe_0/caps/min_interval   1024
    /sys/bus/event_source/devices/arm_spe_0/format/load_filter  config:33
    /sys/bus/event_source/devices/arm_spe_0/format/min_latency  config2:0-11

It picks operations and keeps the loads and stores that took long. It is not asked when they came,
since nothing here wants to know; and for physical addresses only where it also tells memory from
caches, which it does in codes of each core's own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tierd.kernel import text
from tierd.kernel.accesses import PAGE_FAULTS, Event

DEVICES = "sys/bus/event_source/devices"
INTEL = ("cpu", "cpu_core")
AMD, ARM = "ibs_op", "arm_spe_"
LOAD_LATENCY_CYCLES = 64
"""Loads of Intel's CPUs that took less came from a cache; of Arm's it counts from the operation's
start."""
SPE_INTERVAL = 4096
"""Operations between two samples that each SPE can do with."""
NEOVERSE = frozenset({0x41D0C, 0x41D40, 0x41D49, 0x41D4F})
"""Implementer and part of N1, V1, N2 and V2, as MIDR_EL1 has them: cores whose data source 0xe is
memory (common_ds_encoding_cpus, tools/perf/util/arm-spe.c)."""

_FORMAT = re.compile(r"(config[12]?):(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")
_TERM = re.compile(r"(\w+)(?:=(0x[0-9a-f]+|\d+))?")
_WORD_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is sampled: its name, the event, and the most frequent that makes sense.

    `cpus` are those that have it, None for all.
    """

    name: str
    event: Event
    least_period: int
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """There is no event that tells addresses; `why` is for people."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Where the bits of a term go, lowest first."""

    word: str
    bits: Sequence[int]


def find(root: Path = Path("/")) -> Source | Nothing:
    """Returns the event that this machine's CPUs have.

    Raises:
        UnexpectedContent: a file of a PMU holds something else than documented.
    """
    devices = root / DEVICES
    for name in INTEL:
        if (source := _intel(devices / name)) is not None:
            return source
    if (devices / AMD / "type").exists():
        return _amd(devices / AMD)
    for device in text.entries(devices):
        if device.name.startswith(ARM):
            return _arm(root, device)
    return Nothing(why="this machine's CPUs offer no event that tells addresses")


def page_faults() -> Source:
    """Returns the event that comes the same way, and needs no PMU: for trying it."""
    kind, config = PAGE_FAULTS
    return Source(
        name="page-faults", event=Event(type=kind, config=config, period=1), least_period=1
    )


def _intel(device: Path) -> Source | None:
    loads = text.read(device / "events/mem-loads")
    if not loads:
        return None
    terms = _terms(device / "events/mem-loads", loads) | {"ldlat": LOAD_LATENCY_CYCLES}
    auxiliary = text.read(device / "events/mem-loads-aux")
    leader = 0
    if auxiliary:
        leading = _encode(device, _terms(device / "events/mem-loads-aux", auxiliary))
        leader = leading.get("config", 0)
    precise = min(text.read_int(device / "caps/max_precise") or 0, 3)
    event = replace(_event(device, terms), leader=leader, precise=precise)
    cpus = text.read_ids(device / "cpus")  # of a hybrid CPU's, which has cores of two kinds
    return Source(name=f"{device.name}/mem-loads", event=event, least_period=1000, cpus=cpus)


def _amd(device: Path) -> Source:
    offered = {path.name for path in text.entries(device / "format")}
    terms: dict[str, int] = {name: 1 for name in ("cnt_ctl", "l3missonly") if name in offered}
    event = replace(_event(device, terms), excludes_kernel=False)  # IBS cannot
    least = 1 << 12 if "l3missonly" in terms else 1 << 16
    return Source(name=AMD, event=event, least_period=least)


def _arm(root: Path, device: Path) -> Source:
    cpus = text.read_ids(device / "cpumask")
    terms = {"load_filter": 1, "store_filter": 1, "jitter": 1, "min_latency": LOAD_LATENCY_CYCLES}
    cores = _cores(root, cpus or ())
    tells_memory = bool(cores) and cores <= NEOVERSE
    event = _event(device, terms | {"pa_enable": 1} if tells_memory else terms)
    event = replace(event, spe=True, spe_sources=tells_memory)
    least = text.read_int(device / "caps/min_interval") or SPE_INTERVAL
    return Source(name=device.name, event=event, least_period=least, cpus=cpus)


def _cores(root: Path, cpus: Sequence[int]) -> frozenset[int]:
    """Returns implementer and part of the CPUs that are online, as MIDR_EL1 has them."""
    registers = "sys/devices/system/cpu/cpu{}/regs/identification/midr_el1"
    found = (text.read_int(root / registers.format(cpu)) for cpu in cpus)
    return frozenset(midr >> 12 & 0xFF000 | midr >> 4 & 0xFFF for midr in found if midr)


def _event(device: Path, terms: Mapping[str, int]) -> Event:
    words = _encode(device, terms)
    return Event(
        type=_type(device),
        config=words.get("config", 0),
        config1=words.get("config1", 0),
        config2=words.get("config2", 0),
        period=1,
    )


def _type(device: Path) -> int:
    found = text.read_int(device / "type")
    if found is None:
        raise text.UnexpectedContent(device / "type", "", "the number of a PMU")
    return found


def _terms(path: Path, content: str) -> dict[str, int]:
    """Parses an event such as event=0xcd,umask=0x1,ldlat=3; a term without a value is 1."""
    found = [_TERM.fullmatch(term) for term in content.split(",")]
    if None in found:
        raise text.UnexpectedContent(path, content, "terms such as event=0xcd,umask=0x1")
    return {term[1]: int(term[2] or "1", 0) for term in found if term is not None}


def _encode(device: Path, terms: Mapping[str, int]) -> dict[str, int]:
    """Returns the words of perf_event_attr with the terms' bits set."""
    words: dict[str, int] = {}
    for name, value in terms.items():
        field = _field(device / "format" / name)
        bits = (1 << bit for at, bit in enumerate(field.bits) if value >> at & 1)
        words[field.word] = words.get(field.word, 0) | sum(bits)
    return words


def _field(path: Path) -> Field:
    content = text.read(path) or ""
    found = _FORMAT.fullmatch(content)
    bits = [] if found is None else list(_bits(found[2]))
    if found is None or max(bits) >= _WORD_BITS:
        raise text.UnexpectedContent(path, content, "bits such as config1:0-15")
    return Field(word=found[1], bits=bits)


def _bits(ranges: str) -> Iterator[int]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), min(int(last or first), _WORD_BITS) + 1)
