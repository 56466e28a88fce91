# SPDX-License-Identifier: Apache-2.0
"""Writes to /sys, in words."""

import shlex
from pathlib import Path

from tierd.provision.plan import Step


def shown(step: Step, root: Path) -> str:
    """Spells a write as a shell's, which does the same."""
    return f"echo {shlex.quote(step.value)} > {root / step.path}  # {step.why}"
