# SPDX-License-Identifier: Apache-2.0
"""The cache of what guests are made of: trees unpacked from packages, named by their content.

$TIERD_CACHE, else $XDG_CACHE_HOME/tierd, else ~/.cache/tierd
    index/kernel-7.2        the digest of the tree that the name stands for
    trees/3f5c.../          the tree
    lock/kernel-7.2         held while the tree is made
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

Build = Callable[[Path], str]
"""Fills the empty folder that it is given and returns the digest of what it was made from."""


def root() -> Path:
    """The cache's folder, which exists when this returns."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("TIERD_CACHE") or Path(home) / "tierd").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tree(name: str, build: Build) -> Path:
    """The tree of that name; made by `build` if it isn't there, by one process at a time."""
    found = _find(name)
    if found is not None:
        return found
    with lock(name):
        return _find(name) or _make(name, build)


def remembered(name: str) -> str | None:
    """What was remembered under that name, if anything was."""
    try:
        return (root() / "index" / name).read_text().strip()
    except FileNotFoundError:
        return None


def remember(name: str, value: str) -> None:
    """Remembers a line under a name, all at once."""
    index = root() / "index"
    index.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=index, prefix=".", delete=False) as file:
        file.write(f"{value}\n")
    Path(file.name).replace(index / name)


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Keeps other processes with the same cache out; ends with the process at the latest."""
    path = root() / "lock" / name
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find(name: str) -> Path | None:
    digest = remembered(name)
    if digest is None:
        return None
    found = root() / "trees" / digest
    return found if found.is_dir() else None


def _make(name: str, build: Build) -> Path:
    log.warning("fetching %s", name)
    trees = root() / "trees"
    trees.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=trees, prefix=".new-"))
    try:
        # mkdtemp's own mode would shut out the guest's udevd and others who drop root.
        scratch.chmod(0o755)
        digest = build(scratch)
        made = trees / digest
        if not made.exists():
            scratch.rename(made)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    remember(name, digest)
    return made
