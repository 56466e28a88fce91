# SPDX-License-Identifier: Apache-2.0
"""Whether KVM can be used. /dev/kvm may open, answer, and still be unable to run a kernel.

So a guest is booted under it once; the answer holds until the host boots again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from guests import cache

DEVICE = Path("/dev/kvm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def kvm_works(boots: Callable[[], bool]) -> bool:
    """Whether KVM works here; `boots` tries it if nobody has since the host came up."""
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return False
    boot_id = BOOT_ID.read_text().strip()
    with cache.lock("kvm"):
        answer = (cache.remembered("kvm") or "").split()
        if answer[:1] != [boot_id]:
            answer = [boot_id, "yes" if boots() else "no"]
            cache.remember("kvm", " ".join(answer))
    return answer[1] == "yes"


COUNTED_SHIFT = 2
"""By how much a count of instructions is shifted to nanoseconds: each takes 4."""


def arguments(*, kvm: bool, counted: bool = False) -> list[str]:
    """QEMU's arguments; -cpu and the number of CPUs are the topology's.

    `counted`: emulated time goes by instructions, of all CPUs together (docs/decisions/0063). A
    CPU that is there for real has its own time.
    """
    if kvm:
        return ["-accel", "kvm"]
    if counted:
        return ["-accel", "tcg,thread=single", "-icount", f"shift={COUNTED_SHIFT},sleep=on"]
    return ["-accel", "tcg,thread=multi"]
