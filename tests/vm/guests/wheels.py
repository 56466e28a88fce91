# SPDX-License-Identifier: Apache-2.0
"""tierd and all that it needs as wheels, for `scripts/install --wheels` in a guest without network.

What tierd depends on comes for the guest's Python, and what building it takes for the host's; both
lie in the cache, in one tree for each set of them. tierd's own wheel is built from the tree as it
is now: its extension keeps to the stable ABI, so one wheel does for all.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from guests import cache
from guests.debian import Debian
from guests.errors import ArchiveError
from guests.guest import REPOSITORY

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "native", "tierd")


def fetch(debian: Debian) -> Path:
    """The folder with all wheels but tierd's own, from the cache or else from the package index."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    needed: list[str] = project["project"]["dependencies"]
    building: list[str] = project["build-system"]["requires"]
    digest = hashlib.sha256(repr((needed, building, sys.version_info[:2])).encode()).hexdigest()

    def build(folder: Path) -> str:
        platforms = (f"--platform={platform}" for platform in PLATFORMS)
        _download(folder, f"--python-version={debian.python}", *platforms, *needed)
        _download(folder, *building)
        return _digest(folder)

    return cache.tree(f"wheels-{debian}-{digest[:12]}", build)


def build(debian: Debian, version: str | None = None) -> Path:
    """A folder with all wheels, tierd's of the tree as it is now, but for another version."""
    fetched = fetch(debian)
    folder = REPOSITORY / ".out" / f"wheels-{debian}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(fetched, folder)
    with tempfile.TemporaryDirectory(prefix="tierd-wheel-") as scratch:
        # pip builds in the folder that it is given.
        for name in SOURCES:
            source, copy = REPOSITORY / name, Path(scratch) / name
            shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
        if version is not None:
            project = Path(scratch) / "pyproject.toml"
            text = re.sub(r"(?m)^version = .*", f'version = "{version}"', project.read_text())
            project.write_text(text)
        offline = ("--no-index", "--find-links", fetched, "--no-deps")
        _pip("wheel", *offline, "--wheel-dir", folder, scratch)
    return folder


def _download(folder: Path, *arguments: str) -> None:
    _pip("download", "--only-binary=:all:", "--dest", folder, *arguments)


def _pip(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ArchiveError(f"pip {arguments[0]}: {done.stderr.strip()}")


def _digest(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return hashlib.sha256("\n".join(names).encode()).hexdigest()
