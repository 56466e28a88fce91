# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a guest, kept apart from what can go wrong in a test."""

from __future__ import annotations

import re
from pathlib import Path


class GuestError(Exception):
    """The base of all of them: the guest, not what was tested in it, is at fault."""


class ArchiveError(GuestError):
    """A kernel or an emulator could not be fetched from Debian's archive."""


class GuestLost(GuestError):
    """The guest ended, hung or never came up; carries the end of its console."""

    def __init__(self, what: str, console: Path) -> None:
        super().__init__(f"{what}; its console says:\n{excerpt(console)}\n(all of it: {console})")
        self.console = console


class GuestPanic(GuestLost):
    """The guest's kernel panicked."""


class EmulatorFault(GuestPanic):
    """QEMU ran an instruction that the guest's kernel had replaced: docs/decisions/0033."""


class CommandFailed(GuestError):
    """A command that had to succeed in the guest did not."""


class CommandEnded(CommandFailed):
    """A command ended that had more to say."""


class CommandTimeout(CommandFailed):
    """A command took longer than it was given, in a guest that is otherwise well."""


PANIC = "Kernel panic - not syncing"
FAILURE = re.compile(rf"{PANIC}|BUG: |kernel BUG at |Oops: ")
"""How the kernel's report of its own failure begins; where that is an oops, the panic only ends it
(arch/x86/kernel/dumpstack.c)."""


STALE_CODE = "Oops: int3:"


def panicked(name: str, console: Path, *, kvm: bool) -> GuestPanic | None:
    """The error for a guest whose kernel has panicked, by what it printed; None if it hasn't."""
    text = console.read_text(errors="replace")
    if PANIC not in text:
        return None
    if STALE_CODE in text and not kvm:
        what = f"QEMU ran code that the kernel of guest {name} had replaced; try again"
        return EmulatorFault(what, console)
    return GuestPanic(f"the kernel of guest {name} panicked", console)


def excerpt(console: Path, lines: int = 60) -> str:
    """What a console says of the end: a failure from its start, else its last lines."""
    text = console.read_text(errors="replace").splitlines()
    first = next((number for number, line in enumerate(text) if FAILURE.search(line)), -lines)
    return "\n".join(text[first:][:lines]) or "(nothing)"
