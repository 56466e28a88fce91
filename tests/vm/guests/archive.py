# SPDX-License-Identifier: Apache-2.0
"""Packages of any Debian suite, fetched beside the host's own apt and never installed.

Follows apt.conf(5): a configuration of its own has its own sources, lists, status and cache, so
that neither the host's sources nor its packages are touched; only how the host reaches the network
(Acquire::, such as proxies) is taken over. Signatures are checked against Debian's keyring. A
suite's answer looks like this (apt-cache search --names-only '^linux-image-7'):

    linux-image-7.2.13+deb14-amd64 - Linux 7.2 for 64-bit PCs (signed)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from guests.errors import ArchiveError

MIRROR = "http://deb.debian.org/debian"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Suite(StrEnum):
    """Where each major version comes from; an unpacked one doesn't care for the host's suite."""

    TRIXIE = "trixie"
    SID = "sid"


@dataclass(frozen=True, slots=True)
class Apt:
    """One suite's packages, as a private apt sees them."""

    suite: Suite
    folder: Path

    def search(self, pattern: str) -> list[str]:
        """The names of the packages that match a regular expression."""
        found = self._run("apt-cache", "search", "--names-only", pattern)
        return [line.split()[0] for line in found.splitlines()]

    def download(self, packages: Iterable[str]) -> list[Path]:
        """These packages alone."""
        self._run("apt-get", "download", *packages)
        return self._fetched()

    def download_closure(self, packages: Iterable[str]) -> list[Path]:
        """These packages and all that they depend on, down to the C library."""
        self._run("apt-get", "install", "--download-only", "--no-install-recommends", *packages)
        return self._fetched()

    def _fetched(self) -> list[Path]:
        return sorted(self.folder.rglob("*.deb"))

    def _run(self, *command: str) -> str:
        """Runs one of apt's programs.

        Raises:
            ArchiveError: with what apt said.
        """
        environment = {**os.environ, "APT_CONFIG": str(self.folder / "apt.conf"), "LC_ALL": "C"}
        done = subprocess.run(
            [command[0], "--quiet", "--assume-yes", *command[1:]]
            if command[0] == "apt-get"
            else command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise ArchiveError(f"{' '.join(command[:2])} of Debian {self.suite}: {said}")
        return done.stdout


@contextmanager
def suite(name: Suite) -> Iterator[Apt]:
    """A private apt that knows the current packages of one suite."""
    if shutil.which("apt-get") is None or not KEYRING.exists():
        raise ArchiveError(
            f"guests are made of Debian's packages: apt-get and {KEYRING} "
            "(package debian-archive-keyring) are needed"
        )
    with tempfile.TemporaryDirectory(prefix="tierd-apt-") as folder:
        apt = Apt(name, Path(folder))
        _configure(apt)
        apt._run("apt-get", "update")
        yield apt


def unpack(packages: Iterable[Path], into: Path) -> str:
    """Unpacks packages into a folder, without running anything of theirs; returns a digest."""
    digests = []
    for package in packages:
        subprocess.run(["dpkg-deb", "--extract", package, into], check=True)
        with package.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def _configure(apt: Apt) -> None:
    folder = apt.folder
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "sources.list").write_text(f"{source(apt.suite)}\n")
    (folder / "apt.conf").write_text(_configuration(folder))


def source(suite: str) -> str:
    """The line of sources.list(5) for a suite."""
    # The suite's index may be past its date on a mirror that lags; its signature still counts.
    options = f"signed-by={KEYRING} arch=amd64 check-valid-until=no"
    return f"deb [{options}] {MIRROR} {suite} main"


def _configuration(folder: Path) -> str:
    settings = {
        "APT::Architecture": "amd64",
        "APT::Architectures": "amd64",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "5",
        "Dir::State": folder,
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "Dir::Etc::main": "/dev/null",
        "Dir::Etc::parts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Log": folder,
    }
    own = [f'{key} "{value}";' for key, value in settings.items()]
    return "\n".join([*network_settings(), *own, ""])


def network_settings() -> list[str]:
    """The host's `Acquire::` settings; the index targets among them are not about the network."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True)
    return [
        line
        for line in dump.stdout.splitlines()
        if line.startswith("Acquire::") and not line.startswith("Acquire::IndexTargets")
    ]
