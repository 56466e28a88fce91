# SPDX-License-Identifier: Apache-2.0
"""How many instructions each CPU of an emulated guest has run: ../emulator/counter.c."""

from __future__ import annotations

import struct
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "emulator" / "counter.c"
COUNT = "=QQ"
"""Of a CPU: where its own data begins, and its instructions."""


class Counter:
    """The counts of one guest, in a file of the host's."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "instructions"

    def arguments(self, plugin: Path) -> list[str]:
        """Those with which QEMU counts, by what was compiled of SOURCE."""
        return ["-plugin", f"{plugin},into={self._path}"]

    def of_cpu(self, cpu: int) -> int:
        """Returns how many a CPU has run so far.

        Raises:
            FileNotFoundError: QEMU does not count.
        """
        _, count = struct.unpack_from(COUNT, self._path.read_bytes(), struct.calcsize(COUNT) * cpu)
        return int(count)
