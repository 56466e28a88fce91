# SPDX-License-Identifier: Apache-2.0
"""CXL memory devices, decoders and regions: /sys/bus/cxl/devices.

Follows Documentation/ABI/testing/sysfs-bus-cxl and Documentation/driver-api/cxl. All objects lie
in one folder of links; a region names the endpoint decoders of its members, and the endpoint that
such a decoder belongs to (decoderX.Y is of port X) links to its memory device. A region of one
device shows::

    mem0/{serial,ram/size,pmem/size,numa_node,firmware_version}   0x0 0x20000000 0x0 0 (text)
    decoder0.0/devtype                                            cxl_decoder_root
    decoder0.0/{start,size,interleave_ways,locked}                0x190000000 0x100000000 1 1
    decoder2.0/{devtype,region}                                   cxl_decoder_endpoint region0
    endpoint2/uport -> .../0000:0d:00.0/mem0
    region0/{resource,size,mode,commit}                           0x190000000 0x20000000 ram 1
    region0/{interleave_ways,interleave_granularity,target0}      1 256 decoder2.0

Roots, ports and endpoints lie in each other as the hardware does, and a root decoder names host
bridges by the numbers of the root's dports::

    root0/decoder0.0/{target_list,cap_ram,cap_pmem}               12 1 1
    root0/dport12, root0/port1/uport                              both -> .../pci0000:0c
    root0/port1/endpoint2/decoder2.0/{mode,dpa_resource,dpa_size} ram 0x0 0x0000000020000000

A region that is not set up yet has ways 0 and resource 0xffffffffffffffff, a member that is not
chosen yet an empty target, a device in no NUMA node node -1: all of these are None here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tierd.kernel import text
from tierd.model import CxlRegion, Decoder, Memdev, NodeId

DEVICES = Path("sys/bus/cxl/devices")
REGION_DRIVER = Path("sys/bus/cxl/drivers/cxl_region")
DAX_DRIVER = Path("sys/bus/cxl/drivers/cxl_dax_region")
_MAX_WAYS = 16  # the most that the CXL specification has
_TOTAL = re.compile(r"^TOTAL_ERR_\w+ (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemdevHealth:
    """What sysfs tells of a memory device's state. The errors are of its PCI function, since boot.

    `driver` is None where nothing drives it, and then it can have no region. The errors follow
    Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats, and are None where the kernel or the
    firmware keeps them to itself.
    """

    driver: str | None
    security: str | None
    correctable_errors: int | None
    nonfatal_errors: int | None
    fatal_errors: int | None


def read_memdevs(root: Path = Path("/")) -> tuple[Memdev, ...]:
    """Reads every memory device, in ascending order.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    endpoints = {
        text.link_name(path / "uport"): path.resolve() for path in _named(root, r"endpoint\d+")
    }
    return tuple(_read_memdev(path, endpoints.get(path.name)) for path in _named(root, r"mem\d+"))


def read_health(root: Path = Path("/")) -> Mapping[str, MemdevHealth]:
    """Reads what is told of every memory device's health, by their names.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    return {path.name: _read_health(path) for path in _named(root, r"mem\d+")}


def read_decoders(root: Path = Path("/")) -> tuple[Decoder, ...]:
    """Reads every decoder: of roots (the host's windows), switches and endpoints.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    return tuple(_read_decoder(root, path) for path in _named(root, r"decoder\d+\.\d+"))


def read_regions(root: Path = Path("/")) -> tuple[CxlRegion, ...]:
    """Reads every region, with the memory devices it is interleaved over, in their order.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    return tuple(_read_region(root, path) for path in _named(root, r"region\d+"))


def read_next_regions(root: Path = Path("/")) -> Mapping[str, str]:
    """Returns the name that each root decoder for volatile memory gives to a region next."""
    found = {
        path.name: text.read(path / "create_ram_region")
        for path in _named(root, r"decoder\d+\.\d+")
    }
    return {decoder: name for decoder, name in found.items() if name}


def _named(root: Path, pattern: str) -> Iterable[Path]:
    paths = [p for p in text.entries(root / DEVICES) if re.fullmatch(pattern, p.name)]
    return sorted(paths, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])


def _read_memdev(path: Path, endpoint: Path | None) -> Memdev:
    node = text.read_int(path / "numa_node")
    return Memdev(
        name=path.name,
        serial=text.read_int(path / "serial"),
        ram_bytes=text.read_int(path / "ram/size") or 0,
        pmem_bytes=text.read_int(path / "pmem/size") or 0,
        node=None if node is None or node < 0 else NodeId(node),
        firmware=text.read(path / "firmware_version") or None,
        bridge=None if endpoint is None else _bridge(endpoint),
        route=() if endpoint is None else _route(endpoint),
    )


def _route(endpoint: Path) -> tuple[str, ...]:
    """Returns the ports below the root that an endpoint is behind, and itself."""
    ports = [part for part in endpoint.parts if re.fullmatch(r"(port|endpoint)\d+", part)]
    return tuple(ports)


def _bridge(endpoint: Path) -> str | None:
    """Returns the number of the root's dport that an endpoint is behind."""
    above = [endpoint, *endpoint.parents]
    roots = (i for i, path in enumerate(above) if re.fullmatch(r"root\d+", path.name))
    position = next(roots, 0)
    if not position:
        return None
    bridge = text.link_name(above[position - 1] / "uport")
    dports = (p for p in text.entries(above[position]) if re.fullmatch(r"dport\d+", p.name))
    names = (p.name.removeprefix("dport") for p in dports if text.link_name(p) == bridge)
    return next(names, None)


def _read_health(path: Path) -> MemdevHealth:
    function = path.resolve().parent
    return MemdevHealth(
        driver=text.link_name(path / "driver"),
        security=text.read(path / "security/state") or None,
        correctable_errors=_read_errors(function / "aer_dev_correctable"),
        nonfatal_errors=_read_errors(function / "aer_dev_nonfatal"),
        fatal_errors=_read_errors(function / "aer_dev_fatal"),
    )


def _read_errors(path: Path) -> int | None:
    content = text.read(path)
    if content is None:
        return None
    total = _TOTAL.search(content)
    if total is None:
        raise text.UnexpectedContent(path, content, "errors with their total")
    return int(total[1])


def _read_decoder(root: Path, path: Path) -> Decoder:
    locked = text.read_int(path / "locked")
    return Decoder(
        name=path.name,
        kind=(text.read(path / "devtype") or "").removeprefix("cxl_decoder_"),
        start=text.read_address(path / "start"),
        size_bytes=text.read_int(path / "size") or 0,
        interleave_ways=text.read_int(path / "interleave_ways"),
        interleave_granularity_bytes=text.read_int(path / "interleave_granularity"),
        region=text.read(path / "region") or None,
        locked=None if locked is None else bool(locked),
        mode=text.read(path / "mode") or None,
        modes=tuple(mode for mode in ("ram", "pmem") if text.read_int(path / f"cap_{mode}")),
        targets=_read_targets(path / "target_list"),
        memdev=_memdev_of(root, path.name),
        dpa_start=text.read_address(path / "dpa_resource"),
        dpa_bytes=text.read_int(path / "dpa_size") or 0,
    )


def _read_targets(path: Path) -> tuple[str, ...]:
    content = text.read(path) or ""
    targets = tuple(filter(None, content.split(",")))
    if len(targets) > _MAX_WAYS or not all(target.isdecimal() for target in targets):
        raise text.UnexpectedContent(path, content, "numbers of targets")
    return targets


def _read_region(root: Path, path: Path) -> CxlRegion:
    ways = text.read_int(path / "interleave_ways") or 0
    if not 0 <= ways <= _MAX_WAYS:
        raise text.UnexpectedContent(path / "interleave_ways", str(ways), "interleave ways")
    targets = (text.read(path / f"target{position}") for position in range(ways))
    decoders = tuple(decoder for decoder in targets if decoder)
    memdevs = (_memdev_of(root, decoder) for decoder in decoders)
    above = path.resolve().parent.name
    return CxlRegion(
        name=path.name,
        start=text.read_address(path / "resource"),
        size_bytes=text.read_int(path / "size") or 0,
        mode=text.read(path / "mode") or None,
        interleave_ways=ways,
        interleave_granularity_bytes=text.read_int(path / "interleave_granularity") or None,
        memdevs=tuple(memdev for memdev in memdevs if memdev is not None),
        committed=text.read_int(path / "commit") == 1,
        root=above if _is_decoder(above) else None,
        decoders=decoders,
        driver=text.link_name(path / "driver"),
    )


def _is_decoder(name: str) -> bool:
    return re.fullmatch(r"decoder\d+\.\d+", name) is not None


def _memdev_of(root: Path, decoder: str) -> str | None:
    """Follows an endpoint decoder to the memory device that its endpoint stands for."""
    port = re.fullmatch(r"decoder(\d+)\.\d+", decoder)
    if port is None:
        return None
    return text.link_name(root / DEVICES / f"endpoint{port[1]}" / "uport")
