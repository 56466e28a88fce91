# SPDX-License-Identifier: Apache-2.0
"""What the kernel means by refusing a write that makes a region, and what to do about it."""

import errno
import os
import re
from pathlib import Path

from tierd.errors import Conflict, TierdError, UnsupportedKernel
from tierd.kernel import text
from tierd.kernel.text import GONE
from tierd.provision.plan import Step

_CPU_BYTES = 1 << 20  # the first CPU comes within it
_AGAIN = "see that nothing else makes CXL regions (cxl, ndctl), and try again"
_DMESG = "dmesg tells more; dyndbg of cxl_core ('module cxl_core +p') yet more"

_REASONS: dict[tuple[str, int | None], tuple[type[TierdError], str, str]] = {
    ("create_ram_region", errno.EBUSY): (
        Conflict,
        "another tool has made a region meanwhile",
        _AGAIN,
    ),
    ("size", errno.ERANGE): (TierdError, "the window has no free range of this size", "use less"),
    ("size", errno.ENOMEM): (TierdError, "the window has no free range of this size", "use less"),
    ("mode", errno.EBUSY): (Conflict, "the decoder is in use by now", _AGAIN),
    ("mode", errno.ENXIO): (
        TierdError,
        "the device has no volatile capacity",
        "tierctl cxl list shows what it has",
    ),
    ("dpa_size", errno.EBUSY): (Conflict, "the device is in use by now", _AGAIN),
    ("dpa_size", errno.ENOSPC): (Conflict, "the device has less free by now", _AGAIN),
    ("target", errno.EBUSY): (
        TierdError,
        "a decoder on the way is taken, or has a region at higher addresses, which must come last",
        "tierctl cxl list shows the decoders; take such regions apart first",
    ),
    ("target", errno.ENXIO): (
        TierdError,
        "the window does not lead to the device at this position",
        "tierctl cxl list --json has the devices' routes and the windows' targets",
    ),
}


def explained(step: Step, error: OSError, root: Path) -> TierdError:
    """Returns an error that names what was refused, and the next step."""
    refused = f"{step}: {os.strerror(error.errno or 0)}"
    attribute = re.sub(r"\d+$", "", step.path.name)
    if attribute == "commit" and error.errno == errno.ENXIO:
        return _no_flush(refused, root)
    if error.errno in (errno.EPERM, errno.EACCES):
        return TierdError(
            refused, hint="be root, outside of containers; /sys may be mounted read-only"
        )
    kind, why, hint = _REASONS.get((attribute, error.errno), (TierdError, "", _DMESG))
    if not why and error.errno in GONE:
        return Conflict(f"{refused}: a device has gone, or another tool is at work", hint=_AGAIN)
    if not why and error.errno == errno.EBUSY:
        return Conflict(f"{refused}: it is in use", hint=_AGAIN)
    return kind(f"{refused}: {why}" if why else refused, hint=hint)


def _no_flush(refused: str, root: Path) -> TierdError:
    """Tells why a commit found that caches cannot be flushed, which x86 refuses under a hypervisor.

    Source: cxl_region_invalidate_memregion() in drivers/cxl/core/region.c, and
    cpu_cache_has_invalidate_memregion() in arch/x86/mm/pat/set_memory.c.
    """
    lines = text.lines(root / "proc/cpuinfo", _CPU_BYTES)
    flags = next((line.split() for line in lines if line.startswith(b"flags")), [])
    if b"hypervisor" in flags:
        return UnsupportedKernel(
            f"{refused}: the kernel cannot flush the CPUs' caches by address, since it runs "
            "under a hypervisor",
            hint="make the region on the host, or where this is a trial hide the hypervisor from "
            "the guest (QEMU: -cpu max,hypervisor=off)",
        )
    return UnsupportedKernel(
        f"{refused}: the kernel could not synchronize the CPUs' caches, or a decoder is incomplete",
        hint=_DMESG,
    )
