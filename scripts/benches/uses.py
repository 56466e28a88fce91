# SPDX-License-Identifier: Apache-2.0
"""What programs have in arenas, in the shapes of real models: fast tier alone, prefetch, none.

The far tier has no addresses and its speed is simulated, as of `sweep`. The work on a block is a
digest of it, for as long as its copies take, one out and one in. All ways take turns, round by
round. Embedding rows are in tiers of memory and used in place, so that what counts is how many
lookups meet the fast tier: beside the best choice by hindsight, and LRU, on the same trace.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from sweeps.far import Far

from benches.figure import Figure
from tierd.arena import Arena
from tierd.tiers import Tier
from tierd.tiers.memory import cxl, dram
from tierd.uses import EmbeddingTable, Experts, KvCache, KvShape, OptimizerStates

FAR_BYTES_PER_S = 1 << 30
ROUNDS = 5
MOST_OFF_POINTS = 2.0

Round: TypeAlias = Callable[[], None]
Ids: TypeAlias = NDArray[np.int64]


class Work:
    """Digests so much of each block that it lasts as long as a copy out and one in."""

    def __init__(self) -> None:
        block = np.ones(1 << 22, np.uint8)
        begin_s = time.perf_counter()
        hashlib.blake2b(block.data)
        rate = block.nbytes / (time.perf_counter() - begin_s)
        self._times = 2 * rate / FAR_BYTES_PER_S

    def do(self, block: NDArray[np.uint8]) -> None:
        wanted = int(self._times * block.nbytes)
        digest = hashlib.blake2b()
        while wanted > 0:
            digest.update(block[:wanted].data)
            wanted -= block.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A use. `begin` fills an arena and returns what a round does, with prefetch or without."""

    name: str
    block_bytes: int
    blocks: int
    fast: int
    begin: Callable[[Arena, Work, bool], Round]

    def arena(self, *, is_all_fast: bool) -> Arena:
        size = self.block_bytes
        tiers: list[Tier] = [dram((self.blocks if is_all_fast else self.fast) * size)]
        if not is_all_fast:
            tiers.append(Far((self.blocks + 4) * size, FAR_BYTES_PER_S))
        return Arena(size, tiers, blocks=self.blocks)


LLAMA_3_8B = KvShape(layers=32, kv_heads=8, head_dims=128)
SESSIONS, PROMPT_BLOCKS = 8, 16


def chats(arena: Arena, work: Work, is_ahead: bool) -> Round:
    """Sessions that take turns, each reads all of its blocks, and appends a token."""
    cache = KvCache(arena, LLAMA_3_8B)
    count = PROMPT_BLOCKS * LLAMA_3_8B.block_tokens
    kv = np.ones((32, 2, count, 8, 128), np.uint16)
    sessions = [cache.open([number]) for number in range(SESSIONS)]
    for number, session in enumerate(sessions):
        cache.append(session, np.full(count, number), kv)
        if is_ahead:
            cache.pause(session)

    def turns() -> None:
        for at, session in enumerate(sessions):
            if is_ahead:
                cache.prefetch(sessions[(at + 1) % SESSIONS])
            with cache.acquire(session) as held:
                for block in held:
                    work.do(block)
            cache.append(session, [at], kv[:, :, :1])
            if is_ahead:
                cache.pause(session)

    return turns


def adam(elements: int) -> Callable[[Arena, Work, bool], Round]:
    def begin(arena: Arena, work: Work, is_ahead: bool) -> Round:
        states = OptimizerStates(arena, elements, look_ahead=is_ahead)

        def step() -> None:
            for part in states.step():
                m, v = part.states["m"], part.states["v"]
                m *= 0.9
                m += 0.1
                v *= 0.99
                v += 0.01
                for state in (m, v):
                    work.do(state.view(np.uint8))

        return step

    return begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A scaled mixture of experts. Its router is right about the next layer in 9 of 10 cases."""

    layers: int
    experts: int
    selected: int
    numbers: int
    """Of an expert's weights, bfloat16."""
    tokens: int

    @property
    def blocks(self) -> int:
        return self.layers * self.experts

    def begin(self, arena: Arena, work: Work, is_ahead: bool) -> Round:
        experts = Experts(arena, self.layers, self.experts, (self.numbers,))
        weights = np.ones(self.numbers, np.uint16)
        for layer in range(self.layers):
            for expert in range(self.experts):
                experts.write(layer, expert, weights)
        rng = np.random.default_rng(1)

        def infer() -> None:
            chosen, foreseen = self.routes(rng)
            for at, selection in enumerate(chosen):
                layer = at % self.layers
                if is_ahead and at + 1 < len(chosen):
                    experts.predict((layer + 1) % self.layers, foreseen[at + 1])
                with experts.acquire(layer, selection) as selected:
                    for _, parts in selected:
                        for part in parts:
                            work.do(part.view(np.uint8))

        return infer

    def routes(self, rng: np.random.Generator) -> tuple[Ids, Ids]:
        """What is selected step by step, and what was foreseen of it: (steps, selected)."""
        steps = self.tokens * self.layers
        ranks = np.argsort(rng.random((steps, self.experts)), axis=1)
        chosen = ranks[:, : self.selected]
        others = ranks[:, self.selected : 2 * self.selected]
        is_right = rng.random(chosen.shape) < 0.9
        return chosen, np.where(is_right, chosen, others)


MIXTRAL = Mixture(layers=4, experts=8, selected=2, numbers=3 * 512 * 1792, tokens=4)
"""Mixtral 8x7B: an eighth of 32 layers, both sizes of 4096 by 14336 an eighth."""

DEEPSEEK = Mixture(layers=2, experts=64, selected=8, numbers=3 * 896 * 256, tokens=8)
"""DeepSeek-V3: 2 of 58 layers, a fourth of 256 experts, both sizes of 7168 by 2048 an eighth."""

ADAM_ELEMENTS = 16 << 20
"""Of Llama-3-8B's parameters about a 500th."""


def cases() -> list[Case]:
    mixtures = [("Mixtral 8x7B's experts", MIXTRAL), ("DeepSeek-V3's experts", DEEPSEEK)]
    blocks = SESSIONS * (PROMPT_BLOCKS + 1)
    return [
        Case(
            name="Llama-3-8B's KV cache",
            block_bytes=LLAMA_3_8B.block_bytes,
            blocks=blocks,
            fast=blocks // 2,
            begin=chats,
        ),
        Case(
            name="Adam's states",
            block_bytes=2 << 20,
            blocks=ADAM_ELEMENTS * 8 >> 21,
            fast=ADAM_ELEMENTS * 4 >> 21,
            begin=adam(ADAM_ELEMENTS),
        ),
        *(
            Case(
                name=name,
                block_bytes=2 * mixture.numbers,
                blocks=mixture.blocks,
                fast=mixture.blocks // 2,
                begin=mixture.begin,
            )
            for name, mixture in mixtures
        ),
    ]


def run() -> list[Figure]:
    work = Work()
    return [
        *(figure for case in cases() for figure in shares(case, work)),
        *embeddings(CRITEO),
    ]


def shares(case: Case, work: Work, rounds: int = ROUNDS) -> list[Figure]:
    """Of all-fast's speed what is left with half of it fast, with prefetch and without."""
    with ExitStack() as stack:
        ways = [
            case.begin(stack.enter_context(case.arena(is_all_fast=is_all_fast)), work, is_ahead)
            for is_all_fast, is_ahead in ((True, False), (False, True), (False, False))
        ]
        for way in ways:
            way()
        taken = np.array([[seconds(way) for way in ways] for _ in range(rounds)])
    best, with_s, without_s = taken.T
    return [
        Figure.of_rounds(f"{case.name}: with prefetch, of all-fast", list(best / with_s), ""),
        Figure.of_rounds(f"{case.name}: without prefetch", list(best / without_s), ""),
        Figure.of_rounds(f"{case.name}: a round, all fast", list(best), "s"),
    ]


def seconds(way: Round) -> float:
    begin_s = time.perf_counter()
    way()
    return time.perf_counter() - begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """A table, and lookups of it by Zipf's law; an eighth of its blocks are fast."""

    rows: int
    width: int
    block_bytes: int
    batch: int
    exponent: float
    batches: int

    @property
    def per_block(self) -> int:
        return self.block_bytes // (4 * self.width)

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.per_block)

    @property
    def fast(self) -> int:
        return self.blocks // 8

    def trace(self) -> Ids:
        """Rows that are looked up, (batches, batch)."""
        rng = np.random.default_rng(1)
        shares = np.cumsum(1 / np.arange(1, self.rows + 1) ** self.exponent)
        at = rng.random((self.batches, self.batch)) * shares[-1]
        ranks = np.minimum(np.searchsorted(shares, at), self.rows - 1)
        found: Ids = rng.permutation(self.rows)[ranks]
        return found


CRITEO = Lookups(rows=1 << 20, width=16, block_bytes=4096, batch=2048, exponent=1.05, batches=1536)
"""DLRM with Criteo's Kaggle data: its largest table has 10 million rows of 16, here a tenth."""


def embeddings(table: Lookups) -> list[Figure]:
    """Hits and lookups of the second half; the first one is for finding out what is hot."""
    trace = table.trace()
    half = len(trace) // 2
    hits, rates = {}, {}
    for name, slots, keeps in (
        ("all fast", table.blocks, False),
        ("kept hot", table.fast, True),
        ("left alone", table.fast, False),
    ):
        slow = [] if name == "all fast" else [cxl((table.blocks + 64) * table.block_bytes)]
        tiers = [dram(slots * table.block_bytes), *slow]
        with Arena(table.block_bytes, tiers, blocks=table.blocks) as arena:
            rows = EmbeddingTable(arena, table.rows, table.width, keep_hot=keeps)
            rows.write(np.ones((table.rows, table.width), np.float32))
            for batch in trace[:half]:
                rows.lookup(batch)
            arena.wait(rows.ids)
            before, begin_s = rows.lookups.fast, time.perf_counter()
            for batch in trace[half:]:
                rows.lookup(batch)
            rates[name] = trace[half:].size / (time.perf_counter() - begin_s)
            hits[name] = (rows.lookups.fast - before) / trace[half:].size * 100
    blocks = trace // table.per_block
    best = by_hindsight(blocks[half:], table.fast)
    lru = of_lru(blocks.reshape(-1), table.fast, half * table.batch)
    kept, told = hits["kept hot"], "Criteo's rows"
    return [
        Figure.of_rounds(f"{told}: lookups that met the fast tier", [kept], "%"),
        Figure.of_rounds(f"{told}: by the best choice of blocks, in hindsight", [best], "%"),
        Figure.of_rounds(f"{told}: by LRU, simulated", [lru], "%"),
        Figure.of_rounds(
            f"{told}: short of the best", [best - kept], "points", at_most=MOST_OFF_POINTS
        ),
        Figure.of_rounds(f"{told}: beyond LRU", [kept - lru], "points", at_least=0),
        *(
            Figure.of_rounds(f"{told}: lookups, {name}", [rate / 1e6], "M/s")
            for name, rate in rates.items()
        ),
    ]


def by_hindsight(blocks: Ids, slots: int) -> float:
    """Percent of the accesses that are of the most used blocks."""
    times = np.sort(np.bincount(blocks.reshape(-1)))
    return float(times[-slots:].sum() / times.sum() * 100)


def of_lru(blocks: Ids, slots: int, since: int) -> float:
    """Percent of the accesses from one on that find their block among the last used ones."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, block in enumerate(blocks.tolist()):
        if block in kept:
            kept.move_to_end(block)
            hits += number >= since
            continue
        kept[block] = None
        if len(kept) > slots:
            kept.popitem(last=False)
    return hits / (len(blocks) - since) * 100
