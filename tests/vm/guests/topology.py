# SPDX-License-Identifier: Apache-2.0
"""The memory that a guest is given, as a value, and that value as QEMU's arguments.

Follows QEMU's docs/system/devices/cxl.rst and docs/nvdimm.txt. A cxl guest of one device has

    -device pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.0     a host bridge
    -device cxl-rp,bus=cxl.0,id=rp0,chassis=0,slot=2  its root port
    -device cxl-type3,bus=rp0,volatile-memdev=vmem0   the memory
    -M cxl-fmw.0.targets.0=cxl.0,cxl-fmw.0.size=4G    where the host may map it
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIN_REGION_MIB = 256
"""CXL regions, and the capacity of a device, come in multiples of 256 MiB."""

NEAR_NS, NEAR_BANDWIDTH, FAR_BANDWIDTH = 90, "40G", "10G"
"""What HMAT tells of the first node, and of the way to others."""


class Kind(StrEnum):
    """What lies beside the first node's DRAM."""

    CXL = "cxl"
    """CXL type-3 devices: a lower memory tier behind the kernel's CXL drivers."""
    SLOW_NODE = "slow-node"
    """An NVDIMM as system RAM: a lower memory tier at the speed of DRAM."""
    NUMA = "numa"
    """A second node without CPUs, in the same memory tier as the first."""
    FLAT = "flat"
    """Nothing: one node."""


class Emulator(StrEnum):
    """The QEMU that emulates, by its major version."""

    SLOW = "10"
    """Emulates each access to CXL memory: some 50 times slower than DRAM."""
    FAST = "11"
    """Maps a CXL device that isn't interleaved: as fast as DRAM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A machine's memory.

    `slow_mib` has the size of each device of slow memory: of one or two for cxl, of one for
    slow-node and numa, of none for flat. Two CXL devices become two regions, each a node of its
    own, or one region if they are `interleaved`. Where only so many are `plugged` from the start,
    there is all for the others but themselves. With `hmat` a numa guest's firmware tells how fast
    each node is, and the kernel puts the second one into a lower memory tier. With `latencies_ns`
    (and `bandwidths` as QEMU takes them) a cxl guest's firmware tells how fast the way to each
    device is, in the devices' order; what is behind it they tell themselves. With `by_words` the
    kernel of a slow-node guest clears and copies pages by words, and not by bytes as TCG does where
    a CPU is told to be quick at that (docs/decisions/0048). `counted` has an emulated guest's time
    go by the instructions that it runs, so that what takes how long is not its host's doing, and
    its CPUs take turns (docs/decisions/0063).
    """

    kind: Kind
    memory_mib: int = 2048
    slow_mib: tuple[int, ...] = (512,)
    interleaved: bool = False
    plugged: int | None = None
    emulator: Emulator = Emulator.SLOW
    cpus: int = 2
    numa_balancing: bool = False
    hmat: bool = False
    latencies_ns: tuple[int, ...] = ()
    bandwidths: tuple[str, ...] = ()
    by_words: bool = False
    counted: bool = False

    def __post_init__(self) -> None:
        wanted = {Kind.CXL: (1, 2), Kind.FLAT: (0,)}.get(self.kind, (1,))
        if len(self.slow_mib) not in wanted:
            raise ValueError(f"a {self.kind} guest has no {len(self.slow_mib)} slow devices")
        if self.kind is Kind.CXL and any(size % MIN_REGION_MIB for size in self.slow_mib):
            raise ValueError(f"CXL devices come in multiples of {MIN_REGION_MIB} MiB")
        if self.hmat and self.kind is not Kind.NUMA:
            raise ValueError(f"a {self.kind} guest has no HMAT")
        if self.by_words and self.kind is not Kind.SLOW_NODE:
            raise ValueError(f"a {self.kind} guest's kernel clears pages by bytes")
        if self.plugged is not None and self.kind is not Kind.CXL:
            raise ValueError(f"a {self.kind} guest has all of its memory from the start")
        if not 0 <= self.present <= len(self.slow_mib):
            raise ValueError(f"{self.present} of {len(self.slow_mib)} devices cannot be plugged in")
        told = len(self.latencies_ns)
        if told and (self.kind is not Kind.CXL or told != len(self.slow_mib)):
            raise ValueError("a latency for each CXL device, or for none")
        if self.bandwidths and len(self.bandwidths) != told:
            raise ValueError("a bandwidth for each latency, or for none")
        if self.interleaved and len(set(self.slow_mib)) * 2 != len(self.slow_mib):
            raise ValueError("interleaving takes two devices of one size")

    @property
    def name(self) -> str:
        """A short name, unique among the topologies in use, for test ids and file names."""
        sizes = "+".join(str(size) for size in self.slow_mib)
        parts = [str(self.kind), f"{self.memory_mib}", sizes, f"qemu{self.emulator}"]
        if self.interleaved:
            parts.append("interleaved")
        if self.plugged is not None:
            parts.append(f"{self.plugged}plugged")
        if self.cpus != 2:
            parts.append(f"{self.cpus}cpus")
        if self.numa_balancing:
            parts.append("balancing")
        if self.hmat:
            parts.append("hmat")
        if self.by_words:
            parts.append("words")
        if self.counted:
            parts.append("counted")
        if self.latencies_ns:
            parts.append("+".join(f"{latency}ns" for latency in self.latencies_ns))
        if self.bandwidths:
            parts.append("+".join(self.bandwidths))
        return "-".join(part for part in parts if part)

    @property
    def present(self) -> int:
        """How many devices of slow memory are there from the start."""
        return len(self.slow_mib) if self.plugged is None else self.plugged

    def arguments(self) -> list[str]:
        """QEMU's arguments for the machine, its CPUs and all of its memory."""
        machine = {
            Kind.CXL: _cxl,
            Kind.SLOW_NODE: _slow_node,
            Kind.NUMA: _numa,
            Kind.FLAT: _flat,
        }[self.kind]
        return ["-smp", str(self.cpus), *machine(self)]

    def provisioning(self) -> list[str]:
        """The arguments of provision.py, which brings the memory online."""
        options = [str(self.kind), f"--devices={self.present}"]
        if self.interleaved:
            options.append("--interleaved")
        if self.numa_balancing:
            options.append("--numa-balancing")
        return options

    def cxl_device(self, index: int, memory: str) -> dict[str, str]:
        """The properties of one of its CXL devices, as the monitor's device_add takes them.

        `memory` is the id of the backend that it has.
        """
        return {
            "driver": "cxl-type3",
            "bus": f"rp{index}",
            "volatile-memdev": memory,
            "id": f"mem{index}",
        }


def cxl(
    *slow_mib: int,
    interleaved: bool = False,
    plugged: int | None = None,
    emulator: Emulator = Emulator.SLOW,
    latencies_ns: tuple[int, ...] = (),
    bandwidths: tuple[str, ...] = (),
) -> Topology:
    """A guest with one or two CXL devices of the given sizes, or with room for them.

    How fast the ways to them are is not known without `latencies_ns`.
    """
    return Topology(
        kind=Kind.CXL,
        slow_mib=slow_mib or (512,),
        interleaved=interleaved,
        plugged=plugged,
        emulator=emulator,
        latencies_ns=latencies_ns,
        bandwidths=bandwidths,
    )


def slow_node(
    *,
    memory_mib: int = 1024,
    slow_mib: int = 1024,
    by_words: bool = False,
    counted: bool = False,
) -> Topology:
    """A guest whose NVDIMM is a lower tier at RAM speed."""
    return Topology(
        kind=Kind.SLOW_NODE,
        memory_mib=memory_mib,
        slow_mib=(slow_mib,),
        by_words=by_words,
        counted=counted,
    )


def numa(*, memory_mib: int = 1024, slow_mib: int = 1024, hmat: bool = False) -> Topology:
    """A guest of two nodes, in one memory tier unless HMAT tells them apart."""
    return Topology(kind=Kind.NUMA, memory_mib=memory_mib, slow_mib=(slow_mib,), hmat=hmat)


def flat() -> Topology:
    """A guest of one node."""
    return Topology(kind=Kind.FLAT, slow_mib=())


def _cxl(topology: Topology) -> list[str]:
    arguments = ["-machine", "q35,cxl=on,hmat=on"]
    # With CPUID's hypervisor bit set, x86 refuses to flush caches by range, and committing a
    # region fails with ENXIO (drivers/cxl/core/region.c: cxl_region_invalidate_memregion).
    arguments += ["-cpu", "max,hypervisor=off"]
    arguments += ["-m", f"{topology.memory_mib}M,maxmem=16G,slots=8"]
    for index in range(len(topology.slow_mib)):
        arguments += _cxl_port(index)
        if index < topology.present:
            arguments += _cxl_device(topology, index)
    if topology.latencies_ns:
        arguments += [*_first_node(topology), *_tell(0, NEAR_NS, NEAR_BANDWIDTH)]
    bandwidths = topology.bandwidths or (FAR_BANDWIDTH,) * len(topology.latencies_ns)
    for index, told in enumerate(zip(topology.latencies_ns, bandwidths, strict=True)):
        arguments += _generic_port(index, *told)
    return arguments + _cxl_windows(topology)


def _generic_port(index: int, latency_ns: int, bandwidth: str) -> list[str]:
    """A proximity domain that stands for a host bridge, so that HMAT can tell of the way to it.

    The kernel adds to that what the device's CDAT tells: 150 ns for reads in QEMU's own
    (hw/mem/cxl_type3.c: ct3_build_cdat_entries_for_mr).
    """
    node = index + 1
    return [
        *("-numa", f"node,nodeid={node}"),
        *("-object", f"acpi-generic-port,id=gp{index},pci-bus=cxl.{index},node={node}"),
        *_tell(node, latency_ns, bandwidth),
    ]


def _cxl_port(index: int) -> list[str]:
    """A host bridge with a root port."""
    bridge = f"pxb-cxl,bus_nr={12 + 40 * index},bus=pcie.0,id=cxl.{index}"
    port = f"cxl-rp,port={index},bus=cxl.{index},id=rp{index},chassis={index},slot={2 + index}"
    return [
        *("-device", bridge),
        *("-device", port),
    ]


def _cxl_device(topology: Topology, index: int) -> list[str]:
    memory = f"vmem{index}"
    driver, *others = topology.cxl_device(index, memory).items()
    properties = [driver[1], *(f"{name}={value}" for name, value in others)]
    return [
        *("-object", f"memory-backend-ram,id={memory},size={topology.slow_mib[index]}M"),
        *("-device", ",".join(properties)),
    ]


def _cxl_windows(topology: Topology) -> list[str]:
    """Windows of host addresses: one for all devices if interleaved, else one a device.

    The kernel gives each window one NUMA node (drivers/acpi/numa/srat.c: acpi_parse_cfmws).
    """
    bridges = range(len(topology.slow_mib))
    if topology.interleaved:
        targets = ",".join(f"cxl-fmw.0.targets.{bridge}=cxl.{bridge}" for bridge in bridges)
        return ["-M", f"{targets},cxl-fmw.0.size=4G"]
    windows = [
        f"cxl-fmw.{bridge}.targets.0=cxl.{bridge},cxl-fmw.{bridge}.size=4G" for bridge in bridges
    ]
    return ["-M", ",".join(windows)]


def _slow_node(topology: Topology) -> list[str]:
    (slow_mib,) = topology.slow_mib
    return [
        *("-machine", "q35,nvdimm=on"),
        *("-cpu", "max,-erms,-fsrm" if topology.by_words else "max"),
        *("-m", f"{topology.memory_mib}M,slots=4,maxmem=16G"),
        *_first_node(topology),
        *("-numa", "node,nodeid=1"),
        *("-object", f"memory-backend-ram,id=slow,size={slow_mib}M"),
        *("-device", "nvdimm,id=nvdimm0,memdev=slow,node=1"),
    ]


def _numa(topology: Topology) -> list[str]:
    (slow_mib,) = topology.slow_mib
    return [
        *("-machine", "q35,hmat=on" if topology.hmat else "q35"),
        *("-cpu", "max"),
        *("-m", f"{topology.memory_mib + slow_mib}M"),
        *_first_node(topology),
        *("-object", f"memory-backend-ram,id=slow,size={slow_mib}M"),
        *("-numa", f"node,nodeid=1,memdev=slow{',initiator=0' if topology.hmat else ''}"),
        *(_tell(0, NEAR_NS, NEAR_BANDWIDTH) if topology.hmat else ()),
        *(_tell(1, 250, FAR_BANDWIDTH) if topology.hmat else ()),
    ]


def _tell(node: int, latency_ns: int, bandwidth: str) -> list[str]:
    """What HMAT tells of a node; a claim that the emulation does not keep."""
    arguments = []
    table = f"hmat-lb,initiator=0,target={node},hierarchy=memory"
    for access in ("read", "write"):
        arguments += ["-numa", f"{table},data-type={access}-latency,latency={latency_ns}"]
        arguments += ["-numa", f"{table},data-type={access}-bandwidth,bandwidth={bandwidth}"]
    return arguments


def _first_node(topology: Topology) -> list[str]:
    return [
        *("-object", f"memory-backend-ram,id=fast,size={topology.memory_mib}M"),
        *("-numa", f"node,nodeid=0,cpus=0-{topology.cpus - 1},memdev=fast"),
    ]


def _flat(topology: Topology) -> list[str]:
    return ["-machine", "q35", "-cpu", "max", "-m", f"{topology.memory_mib}M"]
