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

A region that is not set up yet has ways 0 and resource 0xffffffffffffffff, a member that is not
chosen yet an empty target, a device in no NUMA node node -1: all of these are None here.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tierd.kernel import text
from tierd.model import CxlRegion, Decoder, Memdev, NodeId

_DEVICES = Path("sys/bus/cxl/devices")
_MAX_WAYS = 16  # the most that the CXL specification has


def read_memdevs(root: Path = Path("/")) -> tuple[Memdev, ...]:
    """Reads every memory device, in ascending order.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    return tuple(map(_read_memdev, _named(root, r"mem\d+")))


def read_decoders(root: Path = Path("/")) -> tuple[Decoder, ...]:
    """Reads every decoder: of roots (the host's windows), switches and endpoints.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    return tuple(map(_read_decoder, _named(root, r"decoder\d+\.\d+")))


def read_regions(root: Path = Path("/")) -> tuple[CxlRegion, ...]:
    """Reads every region, with the memory devices it is interleaved over, in their order.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    return tuple(_read_region(root, path) for path in _named(root, r"region\d+"))


def _named(root: Path, pattern: str) -> Iterable[Path]:
    paths = [p for p in text.entries(root / _DEVICES) if re.fullmatch(pattern, p.name)]
    return sorted(paths, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])


def _read_memdev(path: Path) -> Memdev:
    node = text.read_int(path / "numa_node")
    return Memdev(
        name=path.name,
        serial=text.read_int(path / "serial"),
        ram_bytes=text.read_int(path / "ram/size") or 0,
        pmem_bytes=text.read_int(path / "pmem/size") or 0,
        node=None if node is None or node < 0 else NodeId(node),
        firmware=text.read(path / "firmware_version") or None,
    )


def _read_decoder(path: Path) -> Decoder:
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
    )


def _read_region(root: Path, path: Path) -> CxlRegion:
    ways = text.read_int(path / "interleave_ways") or 0
    if not 0 <= ways <= _MAX_WAYS:
        raise text.UnexpectedContent(path / "interleave_ways", str(ways), "interleave ways")
    targets = (text.read(path / f"target{position}") for position in range(ways))
    memdevs = (_memdev_of(root, decoder) for decoder in targets if decoder)
    return CxlRegion(
        name=path.name,
        start=text.read_address(path / "resource"),
        size_bytes=text.read_int(path / "size") or 0,
        mode=text.read(path / "mode") or None,
        interleave_ways=ways,
        interleave_granularity_bytes=text.read_int(path / "interleave_granularity") or None,
        memdevs=tuple(memdev for memdev in memdevs if memdev is not None),
        committed=text.read_int(path / "commit") == 1,
    )


def _memdev_of(root: Path, decoder: str) -> str | None:
    """Follows an endpoint decoder to the memory device that its endpoint stands for."""
    port = re.fullmatch(r"decoder(\d+)\.\d+", decoder)
    if port is None:
        return None
    return text.link_name(root / _DEVICES / f"endpoint{port[1]}" / "uport")
