# SPDX-License-Identifier: Apache-2.0
"""The tier of a card's memory beside plain copies, and a sweep over layers that half fit it.

Plain copies are cuMemcpyHtoDAsync and cuMemcpyDtoHAsync of the same blocks, with pinned memory,
begun at once and waited for at the end. The tier's own are from and to the same memory. The work on
a layer is copies of it within the card, as many as take as long as the layer's own copies, out and
in, when it is fetched on demand. A token is all layers once. Needs a card: where there is none,
nothing is measured.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from benches.figure import Figure, NotHere
from tierd.arena import Arena, Held, Lookahead
from tierd.errors import TierdError
from tierd.kernel.arena import BATCH
from tierd.kernel.cuda import Card, Context, Range, Stream, cards, pin, unpin
from tierd.kernel.placed import place
from tierd.tiers import Tier
from tierd.tiers.hbm import HbmSpace, hbm
from tierd.tiers.memory import dram

SIZES = (2 << 20, 64 << 10)
BATCHES = 8
LEAST = 0.85
"""Of plain copies, by blocks of 2 MiB. What smaller ones cost beside is told."""

LAYERS, FAST, LAYER_BYTES = 64, 32, 8 << 20
ROUNDS, LAPS = 15, 2


def run() -> list[Figure]:
    try:
        card = cards()[0]
    except TierdError as error:
        raise NotHere(f"{error}: {error.hint}") from error
    return [*(figure for size in SIZES for figure in copies(card, size)), *sweep(card)]


def copies(card: Card, block_bytes: int) -> list[Figure]:
    """What the tier copies in batches as large as a mover's may be, of what plain copies do."""
    slots = BATCH * BATCHES
    order = np.random.default_rng(1).permutation(slots).reshape(BATCHES, BATCH)
    data = place(slots * block_bytes).reshape(BATCHES, BATCH, block_bytes)
    space = hbm(slots * block_bytes, card.number).reserve(block_bytes, slots)
    plain = Plain(space, block_bytes, data)
    figures = []
    try:
        for way, call in (("to the card", space.store), ("from the card", space.load)):
            own, theirs = [], []
            for _ in range(ROUNDS):
                theirs.append(plain.seconds(order, is_in=call == space.store))
                own.append(seconds(call, order, data))
            least = LEAST if block_bytes == SIZES[0] else None
            shares = [theirs_s / own_s for theirs_s, own_s in zip(theirs, own, strict=True)]
            speeds = [data.nbytes / own_s / 1e9 for own_s in own]
            name = f"{card.name}: {way}, blocks of {block_bytes >> 10} KiB"
            figures += [
                Figure.of_rounds(f"{name}, of plain copies", shares, "", at_least=least),
                Figure.of_rounds(name, speeds, "GB/s"),
            ]
    finally:
        plain.close()
        space.free()
    return figures


def seconds(
    call: Callable[[NDArray[np.int64], NDArray[np.uint8]], int],
    order: NDArray[np.int64],
    data: NDArray[np.uint8],
) -> float:
    begin_s = time.perf_counter()
    for slots, blocks in zip(order, data, strict=True):
        call(slots, blocks)
    return time.perf_counter() - begin_s


class Plain:
    """Copies of the same blocks by the driver's own calls."""

    def __init__(self, space: HbmSpace, block_bytes: int, data: NDArray[np.uint8]) -> None:
        self._context = Context(space.device.number)
        self._stream = Stream(self._context)
        self._first, self._block_bytes = space.device.address, block_bytes
        self._data = data
        pin(self._context, data.reshape(-1))

    def seconds(self, order: NDArray[np.int64], *, is_in: bool) -> float:
        host = self._data.ctypes.data
        ways = [
            (self._first + slot * self._block_bytes, host + number * self._block_bytes)
            for number, slot in enumerate(order.reshape(-1).tolist())
        ]
        begin_s = time.perf_counter()
        for at, memory in ways:
            if is_in:
                self._stream.copy_in(at, memory, self._block_bytes)
            else:
                self._stream.copy_out(memory, at, self._block_bytes)
        self._stream.wait()
        return time.perf_counter() - begin_s

    def close(self) -> None:
        unpin(self._context, self._data.reshape(-1))
        self._stream.close()
        self._context.close()


class Work:
    """What the card does with a layer: so many copies of it within its memory."""

    def __init__(self, card: Card) -> None:
        self._context = Context(card.number)
        self._stream = Stream(self._context)
        self._scratch = Range(self._context, LAYER_BYTES)
        self.times = 1

    def do(self, held: Held) -> None:
        for _ in range(self.times):
            self._stream.copy_within(self._scratch.address, int(held.addresses[0]), LAYER_BYTES)
        self._stream.wait()

    def last(self, held: Held, seconds: float) -> None:
        """Has it be as many copies as take that long."""
        self.times = 64
        taken = []
        for _ in range(ROUNDS):
            begin_s = time.perf_counter()
            self.do(held)
            taken.append((time.perf_counter() - begin_s) / self.times)
        self.times = max(1, round(seconds / float(np.median(taken))))

    def close(self) -> None:
        self._stream.close()
        self._scratch.free()
        self._context.close()


def sweep(card: Card) -> list[Figure]:
    """Tokens a second with half of the layers on the card, and with all of them."""
    work = Work(card)
    try:
        with arena(card, LAYERS) as whole, arena(card, FAST) as half, arena(card, FAST) as untold:
            copies_s = time_of(islice(on_demand(untold), 2 * LAYERS)) / (2 * LAYERS)
            with whole.acquire([0], on="hbm") as held:
                work.last(held, copies_s)
            told = Lookahead(half, range(LAYERS), repeats=True)
            ways = (lambda: on_demand(whole), lambda: iter(told), lambda: on_demand(untold))
            for way in ways:
                tokens_per_s(way, work)
            rounds = [[tokens_per_s(way, work) for way in ways] for _ in range(ROUNDS)]
            check(half)
    finally:
        work.close()
    best, ahead, late = np.array(rounds).T
    name = f"{card.name}: sweep over {LAYERS} layers of {LAYER_BYTES >> 20} MiB"
    return [
        Figure.of_rounds(f"{name}, all on the card", best.tolist(), "tokens/s"),
        Figure.of_rounds(f"{name}, half, look-ahead", ahead.tolist(), "tokens/s"),
        Figure.of_rounds(f"{name}, half, look-ahead, of all", (ahead / best).tolist(), ""),
        Figure.of_rounds(f"{name}, half, on demand, of all", (late / best).tolist(), ""),
        Figure.of_rounds(f"{name}, copies of a layer", [copies_s * 1e3], "ms"),
    ]


@contextmanager
def arena(card: Card, fast: int) -> Iterator[Arena]:
    """All layers are in it, as many as there is room for on the card."""
    tiers: list[Tier] = [hbm(fast * LAYER_BYTES, card.number), dram((LAYERS + 2) * LAYER_BYTES)]
    with Arena(LAYER_BYTES, tiers, blocks=LAYERS) as made:
        for number in range(LAYERS):
            made.write([number], layer(number))
        made.prefetch(range(fast))
        made.wait(range(fast))
        yield made


def layer(number: int) -> NDArray[np.uint8]:
    return np.full(LAYER_BYTES, number + 1, np.uint8)


def check(half: Arena) -> None:
    for number in range(LAYERS):
        assert (half.read([number])[0] == layer(number)).all(), f"layer {number} is another"


def on_demand(whole: Arena) -> Iterator[Held]:
    """Each layer in turn, for ever, fetched when it is needed."""
    while True:
        for number in range(LAYERS):
            with whole.acquire([number], on="hbm") as held:
                yield held


def time_of(steps: Iterable[Held]) -> float:
    begin_s = time.perf_counter()
    for _ in steps:
        pass
    return time.perf_counter() - begin_s


def tokens_per_s(way: Callable[[], Iterator[Held]], work: Work) -> float:
    begin_s = time.perf_counter()
    for _ in range(LAPS):
        for held in islice(way(), LAYERS):
            work.do(held)
    return LAPS / (time.perf_counter() - begin_s)
