# SPDX-License-Identifier: Apache-2.0
"""Which new CXL devices are made memory of without being asked for: a pure function."""

from tierd.config import CxlConfig, Provision
from tierd.provision.plan import Found, Request


def request(memdev: str, settings: CxlConfig, found: Found) -> Request | str:
    """Returns what is to be made of a device, or why it is left as it is.

    It is made a region of its own: by what others of one kind come together is for people to say,
    and which of them come is not known yet. One that isn't there is for the plan to refuse.
    """
    if settings.provision is Provision.NO:
        return f'provision is "{Provision.NO}" in [cxl]'
    device = next((device for device in found.memdevs if device.name == memdev), None)
    if device is not None and device.pmem_bytes:
        return "it has persistent memory, so it is for people to name: tierctl cxl create"
    used = [d for d in found.decoders if d.memdev == memdev and (d.region or d.dpa_bytes)]
    if used:
        by = ", ".join(f"{d.name} ({d.region or 'no region'})" for d in used)
        return f"it is in use already: {by}"
    return Request(memdevs=(memdev,), online=settings.online)
