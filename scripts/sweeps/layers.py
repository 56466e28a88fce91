# SPDX-License-Identifier: Apache-2.0
"""Layers that are used in turn, again and again, as a model's weights are for each token.

The work on a layer is a digest of it, BLAKE2b over its bytes for as long as its copies take. It
runs without the GIL, on one CPU, and tells a wrong byte.
"""

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sweeps.far import Far
from tierd.arena import Arena, Held, Lookahead
from tierd.errors import Damaged
from tierd.tiers import Tier
from tierd.tiers.memory import dram

Steps: TypeAlias = Generator[Held, None, None]
"""To be closed: what is held is let go then."""


class Work:
    """What is done with each layer: so many of its bytes, again and again."""

    def __init__(self, layers: NDArray[np.uint8], work_bytes: int) -> None:
        whole, self._rest = divmod(work_bytes, layers.shape[1])
        self._passes = whole
        self._expected = [self.digest(layer) for layer in layers]

    def do(self, number: int, layer: NDArray[np.uint8]) -> None:
        """Works.

        Raises:
            Damaged: it is not the layer of this number.
        """
        if self.digest(layer) != self._expected[number]:
            raise Damaged(f"layer {number} is not what it was")

    def digest(self, layer: NDArray[np.uint8]) -> bytes:
        digest = hashlib.blake2b()
        for _ in range(self._passes):
            digest.update(layer.data)
        digest.update(layer[: self._rest].data)
        return digest.digest()


class Elsewhere:
    """Work that a device does beside the CPUs, which wait for it: simulated.

    Of each layer its first and last bytes are looked at.
    """

    def __init__(self, layers: NDArray[np.uint8], seconds: float) -> None:
        self._layers, self._seconds = layers, seconds

    def do(self, number: int, layer: NDArray[np.uint8]) -> None:
        """Works, and raises as Work does."""
        begin_s = time.monotonic()
        for part in (slice(64), slice(-64, None)):
            if (layer[part] != self._layers[number, part]).any():
                raise Damaged(f"layer {number} is not what it was")
        time.sleep(max(0.0, begin_s + self._seconds - time.monotonic()))


AnyWork: TypeAlias = Work | Elsewhere


class Sweep:
    """Layers of which `fast` have room in the fast tier.

    Args:
        layers: of bytes, a row each; a multiple of 64.
        fast: how many of them.
        far: makes the far tier, of so many bytes.
    """

    def __init__(
        self, layers: NDArray[np.uint8], fast: int, far: Callable[[int], Tier] = Far
    ) -> None:
        self.layers, self.fast = layers, fast
        self._far = far

    @contextmanager
    def arena(self, *, is_all_fast: bool = False) -> Iterator[Arena]:
        """All layers are in it; those that find no room in the fast tier in the far one."""
        count, size = self.layers.shape
        tiers: list[Tier] = [dram((count if is_all_fast else self.fast) * size)]
        if not is_all_fast:
            tiers.append(self._far((count + 2) * size))
        with Arena(size, tiers, blocks=count) as arena:
            for number in range(count):
                arena.write([number], self.layers[number])
            yield arena

    def copies_s(self, laps: int = 2) -> float:
        """Measures what a layer's copies take, one out and one in, when it is needed first."""
        with self.arena() as arena:
            self._fetched(arena)
            begin_s = time.perf_counter()
            for _ in range(laps):
                self._fetched(arena)
        return (time.perf_counter() - begin_s) / laps / len(self.layers)

    def work_for(self, seconds: float) -> Work:
        """Finds out how many bytes are digested in that time."""
        size = self.layers.shape[1]
        rates = [size / _seconds(Work(self.layers[:1], size), layer) for layer in self.layers[:32]]
        return Work(self.layers, max(1, int(float(np.median(rates)) * seconds)))

    def _fetched(self, arena: Arena) -> None:
        for number in range(len(self.layers)):
            arena.acquire([number]).release()


def on_demand(arena: Arena) -> Steps:
    """Each block in turn, for ever, fetched when it is needed."""
    while True:
        for number in range(arena.blocks):
            with arena.acquire([number]) as held:
                yield held


def ahead(lookahead: Lookahead) -> Steps:
    """Each block in turn, for ever, fetched before it is needed."""
    while True:
        yield from lookahead


def seconds_of(steps: Iterable[Held], work: AnyWork, count: int) -> float:
    """Does so many steps; returns the seconds of each."""
    begin_s = time.perf_counter()
    for _, held in zip(range(count), steps, strict=False):
        work.do(int(held.ids[0]), held[0])
    return (time.perf_counter() - begin_s) / count


def some_layers(count: int, layer_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, (count, layer_bytes), dtype=np.uint8)


def _seconds(work: Work, layer: NDArray[np.uint8]) -> float:
    begin_s = time.perf_counter()
    work.digest(layer)
    return time.perf_counter() - begin_s
