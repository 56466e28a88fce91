# SPDX-License-Identifier: Apache-2.0
"""The same memory by NIXL and by pyverbs: what one of them writes, the other reads."""

import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tierd.kernel.nixl import Lent, Reached

BYTES = 2 << 20
DEADLINE_S = 10.0
PROGRAM = Path(__file__).with_name("oracle.py")


class Oracle:
    """oracle.py, which copies between the memory and its mirror."""

    def __init__(self) -> None:
        files = [os.memfd_create(name) for name in ("memory", "mirror")]
        for file in files:
            os.truncate(file, BYTES)
        self.memory, self.mirror = (
            np.frombuffer(mmap.mmap(file, BYTES), np.uint8) for file in files
        )
        self._process = subprocess.Popen(
            ["/usr/bin/python3", str(PROGRAM), *map(str, files), str(BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=files,
            text=True,
        )
        for file in files:
            os.close(file)

    def copy(self, way: str, block: int, blocks: NDArray[np.int64]) -> None:
        """Copies blocks of that size: `read` is to the mirror, `write` is from it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for number in blocks:
            self._process.stdin.write(f"{way} {number * block} {block}\n")
            self._process.stdin.flush()
            assert self._process.stdout.readline() == "done\n"

    def end(self) -> int:
        self._process.communicate()
        return self._process.returncode


@pytest.fixture(scope="module")
def by_pyverbs() -> Iterator[Oracle]:
    oracle = Oracle()
    yield oracle
    assert oracle.end() == 0


@pytest.fixture(scope="module")
def lent(by_pyverbs: Oracle) -> Iterator[Lent]:
    lent = Lent(by_pyverbs.memory)
    yield lent
    lent.end()


@pytest.mark.parametrize("block", [4096, 64 << 10, 1 << 20])
def test_nixl_and_pyverbs_see_the_same(
    block: int, lent: Lent, by_pyverbs: Oracle, carried: Callable[[], int]
) -> None:
    random = np.random.default_rng(block)
    blocks = random.permutation(BYTES // block)[:16]
    memory, mirror = (array.reshape(-1, block) for array in (by_pyverbs.memory, by_pyverbs.mirror))
    by_nixl = Reached(lent.ticket, lent.address, len(memory), block, len(blocks))
    found = np.zeros((len(blocks), block), np.uint8)

    def fill(array: NDArray[np.uint8]) -> None:
        array[:] = random.integers(0, 256, array.shape, dtype=np.uint8)

    fill(memory)
    by_nixl.read(blocks, found, DEADLINE_S)
    assert carried() >= found.nbytes
    by_pyverbs.copy("read", block, blocks)
    assert (found == memory[blocks]).all()
    assert (found == mirror[blocks]).all()

    fill(found)
    by_nixl.write(blocks, found, DEADLINE_S)
    by_pyverbs.copy("read", block, blocks)
    assert (mirror[blocks] == found).all()

    fill(mirror)
    by_pyverbs.copy("write", block, blocks)
    by_nixl.read(blocks, found, DEADLINE_S)
    assert (found == mirror[blocks]).all()

    by_nixl.end()
