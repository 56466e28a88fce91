# SPDX-License-Identifier: Apache-2.0
"""Bare Debian systems in the cache, as an operator has them who is about to install tierd.

mmdebstrap(1) makes them of what is essential, systemd, Python, and what brings slow memory online.
A guest that has one as its root boots with systemd, see enter_debian.sh.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from enum import StrEnum
from pathlib import Path

from guests import archive, cache
from guests.errors import ArchiveError

PACKAGES = (
    *("systemd-sysv", "udev", "kmod", "procps"),
    *("python3", "python3-pip"),
    *("ndctl", "daxctl"),
)


class Debian(StrEnum):
    """A release, by the number that its users know."""

    OLDEST = "12"
    LATEST = "13"

    @property
    def codename(self) -> str:
        return {Debian.OLDEST: "bookworm", Debian.LATEST: "trixie"}[self]

    @property
    def python(self) -> str:
        """The version of its /usr/bin/python3."""
        return {Debian.OLDEST: "3.11", Debian.LATEST: "3.13"}[self]


def fetch(debian: Debian) -> Path:
    """The folder that is its root, from the cache or else from the archive."""
    return cache.tree(f"debian-{debian}", lambda folder: _build(debian, folder))


def _build(debian: Debian, folder: Path) -> str:
    if shutil.which("mmdebstrap") is None:
        raise ArchiveError("mmdebstrap is missing: run ./scripts/setup vm")
    command: list[str | Path] = [
        *([] if os.geteuid() == 0 else ["sudo", "--"]),
        *("mmdebstrap", "--quiet", "--variant=minbase", "--mode=root"),
        *(f"--include={','.join(PACKAGES)}", "--aptopt=Acquire::Retries 5"),
        *(f"--aptopt={line.rstrip(';')}" for line in archive.network_settings()),
        *(debian.codename, folder, archive.source(debian.codename)),
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ArchiveError(f"mmdebstrap of Debian {debian}: {done.stderr.strip()}")
    return hashlib.sha256((folder / "var/lib/dpkg/status").read_bytes()).hexdigest()
