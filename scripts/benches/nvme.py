# SPDX-License-Identifier: Apache-2.0
"""The tier on a disk beside fio, which reads and writes the same file in the same way.

Both take all blocks once in random order, directly and by io_uring. The tier has them in batches as
a mover's are, each of which ends before the next one; fio keeps as many under way all the time.
"""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benches.figure import Figure, NotHere
from tierd.kernel.arena import BATCH
from tierd.kernel.placed import place
from tierd.tiers.nvme import DiskSpace, nvme

FOLDER = Path(__file__).parents[2] / ".out"
SIZES = (64 << 10, 1 << 20)
FILE_BYTES = 512 << 20
MOVER_BYTES = 4 << 20
"""Of a mover's batch, at most (tierd.arena)."""

LEAST_OF_FIO = 0.8
ROUNDS = 9

Space = Callable[[NDArray[np.int64], NDArray[np.uint8]], int]


def run() -> list[Figure]:
    if shutil.which("fio") is None:
        raise NotHere("there is no fio: ./scripts/setup bench installs it")
    return [figure for size in SIZES for figure in beside_fio(size)]


def beside_fio(block_bytes: int) -> list[Figure]:
    """What the tier reads and writes of a second, of what fio does."""
    slots, batch = FILE_BYTES // block_bytes, min(BATCH, MOVER_BYTES // block_bytes)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        file = Path(folder) / "blocks"
        space = nvme(file, FILE_BYTES).reserve(block_bytes, slots)
        try:
            return [
                figure
                for way in ("write", "read")
                for figure in in_turn(space, file, way, block_bytes, batch)
            ]
        finally:
            space.free()


def in_turn(space: DiskSpace, file: Path, way: str, block_bytes: int, batch: int) -> list[Figure]:
    call = space.store if way == "write" else space.load
    own, theirs = [], []
    through(space.store, space.slots, batch, block_bytes)  # the file's blocks are there
    for _ in range(ROUNDS):
        own.append(through(call, space.slots, batch, block_bytes))
        theirs.append(fio(file, way, block_bytes, batch))
    name = f"{way} blocks of {block_bytes >> 10} KiB, {batch} at a time, by {space.parts.name}"
    shares = [mine / other for mine, other in zip(own, theirs, strict=True)]
    return [
        Figure.of_rounds(name, [each / 1e6 for each in own], "MB/s"),
        Figure.of_rounds(f"{name}: of fio's", shares, "times", at_least=LEAST_OF_FIO),
    ]


def through(call: Space, slots: int, batch: int, block_bytes: int) -> float:
    """Returns the bytes of a second that go through a call."""
    order = np.random.default_rng(1).permutation(slots).reshape(-1, batch)
    data = place(batch * block_bytes).reshape(batch, block_bytes)
    begin_s = time.perf_counter()
    for some in order:
        call(some, data)
    return slots * block_bytes / (time.perf_counter() - begin_s)


def fio(file: Path, way: str, block_bytes: int, depth: int) -> float:
    """Returns the bytes of a second that fio does."""
    done = subprocess.run(
        [
            *("fio", "--name=blocks", f"--filename={file}", f"--rw=rand{way}"),
            *(f"--bs={block_bytes}", f"--iodepth={depth}", f"--size={FILE_BYTES}"),
            *("--direct=1", "--ioengine=io_uring", "--output-format=json"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    (job,) = json.loads(done.stdout)["jobs"]
    return float(job[way]["bw_bytes"])
