# SPDX-License-Identifier: Apache-2.0
"""The kernels that guests boot: Debian's, unpacked into the cache.

Debian's packages come in two layouts. Up to 6.12 all is in linux-image-VERSION; since then

    linux-binary-7.2.13+deb14-amd64   usr/lib/modules/7.2.13+deb14-amd64/vmlinuz
    linux-modules-7.2.13+deb14-amd64  usr/lib/modules/7.2.13+deb14-amd64/kernel/...
    linux-base-7.2.13+deb14-amd64     usr/lib/modules/7.2.13+deb14-amd64/config
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from guests import archive, cache
from guests.archive import Apt, Suite
from guests.errors import ArchiveError


class Kernel(StrEnum):
    """A kernel series."""

    LTS = "6.12"
    LATEST = "7.2"

    @property
    def suite(self) -> Suite:
        """The suite of Debian that has it."""
        return Suite.TRIXIE if self is Kernel.LTS else Suite.SID


@dataclass(frozen=True, slots=True)
class Installed:
    """A kernel in the cache; its modules lie where virtme-ng looks for them beside the image."""

    release: str
    image: Path
    modules: Path
    """The folder that has them, by release."""


def fetch(kernel: Kernel) -> Installed:
    """The newest kernel of that series, from the cache or else from the archive."""
    tree = cache.tree(f"kernel-{kernel}", lambda folder: _build(kernel, folder))
    (modules,) = (tree / "usr/lib/modules").iterdir()
    (image,) = [*tree.glob("boot/vmlinuz-*"), *modules.glob("vmlinuz")]
    return Installed(modules.name, image, modules.parent)


def _build(kernel: Kernel, folder: Path) -> str:
    with archive.suite(kernel.suite) as apt:
        release = newest_release(apt, kernel)
        names = re.escape(release)
        packages = apt.search(f"^linux-(binary|modules|base)-{names}$")
        if not packages:
            packages = [f"linux-image-{release}"]
        digest = archive.unpack(apt.download(packages), folder)
    subprocess.run(["depmod", "--basedir", folder / "usr", release], check=True)
    return digest


def newest_release(apt: Apt, kernel: Kernel) -> str:
    """The newest release of a series, such as 7.2.13+deb14-amd64."""
    prefix = "linux-image-"
    series = re.escape(kernel)
    found = apt.search(rf"^{prefix}{series}(\.[0-9]+)*(\+deb[0-9]+)?(-[0-9]+)?-amd64$")
    if not found:
        raise ArchiveError(f"Debian {apt.suite} has no kernel {kernel} any more")
    return max((name.removeprefix(prefix) for name in found), key=version)


def version(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release))
