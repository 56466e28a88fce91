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


class CommandFailed(GuestError):
    """A command that had to succeed in the guest did not."""


class CommandTimeout(CommandFailed):
    """A command took longer than it was given, in a guest that is otherwise well."""


PANIC = "Kernel panic - not syncing"
FAILURE = re.compile(rf"{PANIC}|BUG: |kernel BUG at |Oops: ")
"""How the kernel's report of its own failure begins; where that is an oops, the panic only ends it
(arch/x86/kernel/dumpstack.c)."""


def panicked(console: Path) -> bool:
    """Whether the kernel that printed there has panicked."""
    return PANIC in console.read_text(errors="replace")


def excerpt(console: Path, lines: int = 60) -> str:
    """What a console says of the end: a failure from its start, else its last lines."""
    text = console.read_text(errors="replace").splitlines()
    first = next((number for number, line in enumerate(text) if FAILURE.search(line)), -lines)
    return "\n".join(text[first:][:lines]) or "(nothing)"
