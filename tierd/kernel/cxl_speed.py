# SPDX-License-Identifier: Apache-2.0
"""How fast CXL regions are, as the kernel reckons it of HMAT, the links and the devices' CDAT.

Follows Documentation/ABI/testing/sysfs-bus-cxl: accessX/{read,write}_{latency,bandwidth} of a
region, in ns and MB/s, as those of a node. Of a device at 32 GT/s, of 150 ns by its CDAT, behind a
host bridge that is 100 ns away, Linux 7.2 shows::

    region0/access1/read_latency                    17250
    region0/access1/read_bandwidth                  10240
    0000:0c:00.0/current_link_speed                 32.0 GT/s PCIe

and the node's own figures are the same, where they are there: Linux 6.12 has none. 17,000 of that
is an error of units: cxl_pci_get_latency() in drivers/cxl/core/pci.c gives the time that a flit of
68 bytes takes on a link, 17 ns, in ps, and cxl_endpoint_get_perf_coordinates() adds that to ns.
A latency that is at least as long as such an error of all links of its region is taken to have it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tierd.kernel import text
from tierd.kernel.cxl import DEVICES
from tierd.kernel.nodes import read_performance
from tierd.model import CxlRegion, Performance

_SPEED = re.compile(r"(\d+)\.(\d) GT/s")
_FLITS = (256, 68)
"""Bytes, of links with and without PCIe's flit mode, which sysfs doesn't tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSpeed:
    """As of a node: from the nearest initiator of any kind, and from the nearest with CPUs."""

    any_initiator: Performance | None
    cpu_initiator: Performance | None


def read_speed(region: CxlRegion, root: Path = Path("/")) -> RegionSpeed | None:
    """Returns what is told of a region, None where that is nothing.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    folder = root / DEVICES / region.name
    speeds = [read_performance(folder / f"access{number}") for number in range(2)]
    if speeds == [None, None]:
        return None
    links = [_links(memdev, root) for memdev in region.memdevs]
    errors = {flit: max((_flits_ps(flit, path) for path in links), default=0) for flit in _FLITS}
    any_initiator, cpu_initiator = (_corrected(speed, errors) for speed in speeds)
    return RegionSpeed(any_initiator=any_initiator, cpu_initiator=cpu_initiator)


def _links(memdev: str, root: Path) -> list[int]:
    """Returns the speeds of the links between a host bridge and a device, Mbit/s a lane.

    Each is told by the port at its upper end, as the kernel asks for it: the function's parent,
    and with a switch between, the parent of that one's parent.
    """
    function = (root / DEVICES / memdev).resolve().parent
    above = (text.read(path / "current_link_speed") for path in list(function.parents)[::2])
    found = (_SPEED.match(speed) for speed in above if speed)
    return [int(speed[1]) * 1000 + int(speed[2]) * 100 for speed in found if speed]


def _flits_ps(flit_bytes: int, links_mbps: list[int]) -> int:
    """Returns what a flit takes on these links, by the kernel's own arithmetic."""
    return sum(flit_bytes * 1_000_000 // (speed // 8) for speed in links_mbps)


def _corrected(speed: Performance | None, errors: Mapping[int, int]) -> Performance | None:
    if speed is None:
        return None
    return replace(
        speed,
        read_latency_ns=_without_error(speed.read_latency_ns, errors),
        write_latency_ns=_without_error(speed.write_latency_ns, errors),
    )


def _without_error(latency_ns: int | None, errors: Mapping[int, int]) -> int | None:
    """Takes ps for what they are."""
    if latency_ns is None:
        return None
    error = next((error for error in errors.values() if 0 < error <= latency_ns), 0)
    return latency_ns - error + round(error / 1000)
