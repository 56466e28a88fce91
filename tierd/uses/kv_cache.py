# SPDX-License-Identifier: Apache-2.0
"""A paged KV cache in an arena: sessions of tokens, with keys and values in blocks of some tokens.

A block that is full is known by a hash of its tokens and of all before it, as in vLLM, and is
shared by the sessions that begin alike; one that is not full is of one session alone, so that
nothing which is shared is ever written. Blocks of sessions that have ended stay as long as there is
room. A session's last ones go first, and of sessions the one that ended first: so roots go last.
"""

import hashlib
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from tierd.arena import Arena, Held
from tierd.errors import Busy, NoRoom, NotFound, TierdError
from tierd.uses.rows import Ids, Rows, chunks, exactly

MOST_TOKEN = 1 << 32
"""Token ids are below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What a block has: keys (0) and values (1) of some tokens, (layers, 2, tokens, heads, dims).

    Llama-3-8B has 32 layers, 8 KV heads and 128 dims: with 16 tokens that is 2 MiB of bfloat16, for
    which NumPy's uint16 stands. With one layer, and a cache for each, blocks are of that layer.
    """

    layers: int
    kv_heads: int
    head_dims: int
    block_tokens: int = 16
    dtype: DTypeLike = np.uint16

    @property
    def of_block(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.block_tokens, self.kv_heads, self.head_dims)

    @property
    def block_bytes(self) -> int:
        """The least that an arena's blocks have to be, a multiple of 64."""
        raw = int(np.prod(self.of_block, dtype=np.int64)) * np.dtype(self.dtype).itemsize
        return -(-raw // 64) * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStats:
    """In blocks: `used` by sessions, `kept` of ended ones, `evicted` and `reused` so far."""

    used: int
    kept: int
    free: int
    evicted: int
    reused: int


@dataclass(slots=True)
class _Session:
    tokens: NDArray[np.uint32]
    """All that are stored."""
    table: Ids
    """Of its blocks."""
    hash: bytes
    """Of its full blocks."""
    is_admitted: bool = True


@dataclass(slots=True)
class _Known:
    """Full blocks by hash; those that no session uses in the order in which they are to go."""

    block: dict[bytes, int] = field(default_factory=dict)
    hash: dict[int, bytes] = field(default_factory=dict)
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)


class KvCache:
    """Sessions over all of an arena's blocks; for one thread at a time.

    Args:
        arena: for the cache alone. How many blocks it has is how many there can be in all tiers.
        shape: of a block.
        headroom: the part of the fast tier that is for what running sessions append: prefetch()
            leaves it alone, and blocks of ended sessions make way for it.

    Raises:
        TierdError: the arena's blocks are too small, or an argument can't be.
    """

    def __init__(self, arena: Arena, shape: KvShape, *, headroom: float = 0.1) -> None:
        if min(shape.of_block) < 1:
            raise TierdError(f"a KV cache of {shape.of_block}: nothing is to be kept")
        if not 0 <= headroom < 1:
            raise TierdError(f"headroom {headroom}: from 0 to below 1")
        self.arena, self.shape = arena, shape
        self._rows = Rows(arena, arena.blocks, shape.of_block, shape.dtype)
        if self._rows.per_block != 1:
            raise TierdError(
                f"blocks of {arena.block_bytes} bytes, each with room for {self._rows.per_block}",
                hint=f"make the arena with block_bytes={shape.block_bytes}, or with more tokens",
            )
        self._room = int(arena.shared.tiers[0].slots * (1 - headroom))
        self._refs = np.zeros(arena.blocks, np.int32)
        self._free: list[int] = list(range(arena.blocks - 1, -1, -1))
        self._known = _Known()
        self._sessions: dict[int, _Session] = {}
        self._next = self._evicted = self._reused = 0

    @property
    def stats(self) -> KvStats:
        used = int(np.count_nonzero(self._refs))
        return KvStats(
            used=used,
            kept=len(self._known.kept),
            free=len(self._free),
            evicted=self._evicted,
            reused=self._reused,
        )

    def open(self, prompt: ArrayLike, *, salt: bytes = b"") -> int:
        """Begins a session with what is there of its prompt already, but for the last token.

        That one is left to the model, which needs something to answer to. What length() says is
        there; append() the rest. Nothing is moved: see prefetch().

        Args:
            prompt: token ids.
            salt: sessions share only with those of the same one. With one for each tenant nobody
                finds out by the time it takes what others have asked.

        Returns:
            Its number.

        Raises:
            TierdError: the prompt is not of token ids.
        """
        tokens = _tokens(prompt)
        size = self.shape.block_tokens
        found, digest = [], hashlib.sha256(salt).digest()
        for first in range(0, len(tokens) - size, size):
            following = _hash(digest, tokens[first : first + size])
            block = self._known.block.get(following)
            if block is None:
                break
            found.append(block)
            digest = following
        table = np.array(found, np.int64)
        self._share(table)
        self._reused += len(table)
        self._next += 1
        self._sessions[self._next] = _Session(tokens[: len(table) * size].copy(), table, digest)
        return self._next

    def fork(self, session: int) -> int:
        """Begins another session that is like this one so far: full blocks are shared.

        Returns:
            Its number.

        Raises:
            NotFound: no such session.
            NoRoom: there is none for a copy of the block that is not full.
        """
        of = self._session(session)
        shared = of.table[: len(of.tokens) // self.shape.block_tokens]
        rest = of.table[len(shared) :]
        copy = self._take(len(rest))
        try:
            self.arena.write(copy, self.arena.read(rest))
        except BaseException:
            self._let_go(copy)
            raise
        self._share(shared)
        table = np.concatenate((shared, copy))
        self._next += 1
        self._sessions[self._next] = _Session(of.tokens.copy(), table, of.hash)
        return self._next

    def length(self, session: int) -> int:
        """Tells how many of its tokens are stored."""
        return len(self._session(session).tokens)

    def append(self, session: int, tokens: ArrayLike, kv: NDArray[Any]) -> None:
        """Stores what follows: all of it, or nothing where there is no room.

        Args:
            session: that is open.
            tokens: their ids.
            kv: of each layer keys and values, (layers, 2, len(tokens), heads, dims).

        Raises:
            NotFound: no such session.
            TierdError: tokens or kv are of another shape or dtype.
            NoRoom: every block is used by an open session.
        """
        of, more = self._session(session), _tokens(tokens)
        layers, _, size, heads, dims = self.shape.of_block
        exactly(kv, (layers, 2, len(more), heads, dims), self._rows.dtype, "kv")
        begin, end = len(of.tokens), len(of.tokens) + len(more)
        fresh = self._take(-(-end // size) - len(of.table))
        self._make_way(len(fresh))
        table = np.concatenate((of.table, fresh))
        try:
            for at in range(begin // size, len(table) if len(more) else 0):
                first, last = max(begin, at * size), min(end, (at + 1) * size)
                with self.arena.acquire(table[at : at + 1], write=True) as held:
                    block = self.view(held[0])
                    block[:, :, first - at * size : last - at * size] = kv[
                        :, :, first - begin : last - begin
                    ]
        except BaseException:
            self._let_go(fresh)
            raise
        of.tokens, of.table = np.concatenate((of.tokens, more)), table
        for at in range(begin // size, end // size):
            self._know(of, at)

    def view(self, block: NDArray[np.uint8]) -> NDArray[Any]:
        """Shows a block that is held as (layers, 2, block tokens, heads, dims)."""
        shown: NDArray[Any] = self._rows.shaped(block)[0]
        return shown

    def acquire(self, session: int) -> Held:
        """Holds all of a session's blocks in order, for who attends by their addresses.

        Raises:
            NotFound, NoRoom: no such session; memory is too small for all of it.
        """
        return self.arena.acquire(self._session(session).table)

    def gather(self, session: int, layer: int) -> NDArray[Any]:
        """Copies a layer's keys and values out: (2, tokens, heads, dims).

        Raises:
            NotFound: no such session or layer.
        """
        of = self._session(session)
        if not 0 <= layer < self.shape.layers:
            raise NotFound(
                f"there is no layer {layer}",
                hint=f"they are numbered from 0 to {self.shape.layers - 1}",
            )
        _, _, size, heads, dims = self.shape.of_block
        out = np.empty((2, len(of.table), size, heads, dims), self._rows.dtype)
        for first, ids in chunks(of.table, self.arena):
            with self.arena.acquire(ids) as held:
                for memory, numbers, slots in held.by_memory():
                    layers = self._rows.shaped(memory)[:, 0, layer]
                    out[:, first + numbers] = layers[slots].swapaxes(0, 1)
        return out.reshape(2, size * len(of.table), heads, dims)[:, : len(of.tokens)]

    def pause(self, session: int) -> int:
        """Has what is this session's alone go to the slowest tier, until prefetch().

        Returns:
            How many blocks are to be moved.
        """
        of = self._session(session)
        of.is_admitted = False
        return self.arena.demote(of.table[self._refs[of.table] == 1])

    def prefetch(self, session: int) -> bool:
        """Has a session's blocks brought to the fastest tier, as it is about to run.

        It is admitted first: only if they have room there beside those of all that run (which are
        the sessions that were not paused), nothing is moved for it otherwise. So many that wait
        don't push out who runs.

        Returns:
            Whether it is admitted, and counts as running. Without, it can be used all the same.
        """
        of = self._session(session)
        running = [other.table for other in self._sessions.values() if other.is_admitted]
        of.is_admitted = len(np.unique(np.concatenate([*running, of.table]))) <= self._room
        if of.is_admitted:
            self._make_way(int(np.count_nonzero(self.arena.places(of.table))))
            self.arena.prefetch(of.table)
        return of.is_admitted

    def close(self, session: int) -> None:
        """Ends a session. What no other one uses is kept as long as there is room.

        Raises:
            NotFound: no such session.
        """
        self._let_go(self._session(session).table)
        del self._sessions[session]
        self._make_way(0)

    def _session(self, session: int) -> _Session:
        found = self._sessions.get(session)
        if found is None:
            was = 0 < session <= self._next
            raise NotFound(
                f"session {session} is {'closed' if was else 'unknown'}",
                hint="use the number that open() or fork() returned, before close()",
            )
        return found

    def _know(self, session: _Session, at: int) -> None:
        """A block is full. Where another one has the same, that is shared and this one given up."""
        size = self.shape.block_tokens
        session.hash = _hash(session.hash, session.tokens[at * size : (at + 1) * size])
        block = int(session.table[at])
        first = self._known.block.setdefault(session.hash, block)
        if first == block:
            self._known.hash[block] = session.hash
            return
        self._share(np.array([first]))
        session.table[at] = first
        self._let_go(np.array([block]))

    def _share(self, blocks: Ids) -> None:
        self._refs[blocks] += 1
        for block in blocks.tolist():
            self._known.kept.pop(block, None)

    def _let_go(self, blocks: Ids) -> None:
        """The last first: so a block is never kept longer than what it follows."""
        self._refs[blocks] -= 1
        gone = []
        for block in blocks[self._refs[blocks] == 0][::-1].tolist():
            if block in self._known.hash:
                self._known.kept[block] = None
            else:
                gone.append(block)
        self._give_up(gone)

    def _take(self, count: int) -> Ids:
        """Takes so many free blocks for one session, if need be of those that are kept."""
        missing = count - len(self._free)
        if missing > len(self._known.kept):
            raise NoRoom(
                f"{count} blocks are needed: {len(self._free)} are free, {len(self._known.kept)} "
                f"are kept, and {len(self._sessions)} open sessions have the other ones",
                hint="close a session, or make the arena's tiers larger",
            )
        if missing > 0:
            going = [self._known.kept.popitem(last=False)[0] for _ in range(missing)]
            for block in going:
                del self._known.block[self._known.hash.pop(block)]
            self._evicted += missing
            self._give_up(going)
        taken = np.array([self._free.pop() for _ in range(count)], np.int64)
        self._refs[taken] = 1
        return taken

    def _give_up(self, blocks: list[int]) -> None:
        """One that somebody holds by mistake is written over later, by who waits for it."""
        self._free.extend(blocks)
        for block in blocks:
            with suppress(Busy, NotFound):
                self.arena.discard([block], timeout_s=0)

    def _make_way(self, coming: int) -> None:
        """Has blocks of ended sessions leave the fast tier, as far as its headroom is short."""
        short = coming + self.arena.moves().used[0] - self._room
        if short > 0 and self._known.kept:
            kept = np.fromiter(self._known.kept, np.int64, len(self._known.kept))
            self.arena.demote(kept[self.arena.places(kept) == 0][:short])


def _tokens(given: ArrayLike) -> NDArray[np.uint32]:
    found = np.asarray(given)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TierdError(f"tokens are whole numbers in a row, not {found.dtype} {found.shape}")
    wrong = (found < 0) | (found >= MOST_TOKEN)
    if wrong.any():
        raise TierdError(f"token {found[wrong][0]}", hint="ids are from 0 to below 2^32")
    return found.astype(np.uint32)


def _hash(parent: bytes, tokens: NDArray[np.uint32]) -> bytes:
    """SHA-256: who chooses prompts must not find two with the same."""
    return hashlib.sha256(parent + tokens.tobytes()).digest()
