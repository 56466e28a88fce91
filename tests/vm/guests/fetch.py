# SPDX-License-Identifier: Apache-2.0
"""Fetches all that guests are made of, so that boots need no network: `python -m guests.fetch`."""

from __future__ import annotations

import sys

from guests import debian, emulators, kernels, wheels
from guests.debian import Debian
from guests.errors import ArchiveError
from guests.kernels import Kernel
from guests.topology import Emulator


def main() -> None:
    """Fetches what is missing."""
    try:
        for kernel in Kernel:
            kernels.fetch(kernel)
        for emulator in Emulator:
            emulators.fetch(emulator)
        emulators.fetch_busybox()
        debian.fetch(Debian.LATEST)
        wheels.fetch(Debian.LATEST)
    except ArchiveError as error:
        sys.exit(f"guests: {error}")


if __name__ == "__main__":
    main()
