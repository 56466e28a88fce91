# SPDX-License-Identifier: Apache-2.0
"""Device DAX: /sys/bus/dax/devices, how memory that is not plain DRAM becomes a NUMA node.

Follows Documentation/ABI/testing/sysfs-bus-dax. The device's place in the tree tells what is
behind it: a CXL region (drivers/dax/cxl.c), an NVDIMM namespace (drivers/dax/pmem.c), or memory
that the firmware set aside (drivers/dax/hmem)::

    dax0.0 -> ../../../devices/platform/ACPI0017:00/root0/decoder0.0/region0/dax_region0/dax0.0
    dax1.0 -> ../../../devices/LNXSYSTM:00/.../ACPI0012:00/ndbus0/region1/dax1.1/dax1.0
    dax2.0 -> ../../../devices/platform/hmem.0/dax2.0

    dax0.0/{size,target_node,resource}    536870912 1 0x190000000
    dax0.0/driver -> ../../../../../../bus/dax/drivers/kmem

With the driver kmem its memory is that of `target_node`; with device_dax it is a file in /dev.
"""

import re
from pathlib import Path

from tierd.kernel import text
from tierd.model import Backing, DaxDevice, NodeId

KMEM = Path("sys/bus/dax/drivers/kmem")
_DEVICES = Path("sys/bus/dax/devices")


def read_dax_devices(root: Path = Path("/")) -> tuple[DaxDevice, ...]:
    """Reads every dax device that has a size, by name.

    Raises:
        UnexpectedContent: an attribute is not as documented.
    """
    devices = map(_read_device, text.entries(root / _DEVICES))
    return tuple(device for device in devices if device.size_bytes)


def _read_device(path: Path) -> DaxDevice:
    node = text.read_int(path / "target_node")
    above = path.resolve().parts
    return DaxDevice(
        name=path.name,
        size_bytes=text.read_int(path / "size") or 0,
        target_node=None if node is None or node < 0 else NodeId(node),
        driver=text.link_name(path / "driver"),
        region=next((part for part in above if re.fullmatch(r"region\d+", part)), None),
        backing=_backing(above),
        start=text.read_address(path / "resource"),
    )


def _backing(above: tuple[str, ...]) -> Backing:
    if any(re.fullmatch(r"dax_region\d+", part) for part in above):
        return Backing.CXL
    if any(re.fullmatch(r"ndbus\d+", part) for part in above):
        return Backing.PMEM
    return Backing.UNKNOWN
