# SPDX-License-Identifier: Apache-2.0
"""A program's blocks, each in the tier where it is best: docs/arena.md.

Readers of a block share it, a writer has it alone, and movers copy it without holding anybody up:
a copy counts only if nobody held or wrote the block meanwhile. What moves is asked for (prefetch(),
demote()), or needed: a block that is read comes to memory, and what was not used makes way.
"""

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierd.arena.bandwidth import Bandwidth, Setter
from tierd.arena.held import Held, Place
from tierd.arena.movers import give_back, move
from tierd.arena.shared import MOST_BLOCKS, Shared, SharedTier
from tierd.arena.steered import Steered, Steering
from tierd.errors import Busy, Damaged, Lost, NoRoom, NotFound, TierdError, TierFailed
from tierd.kernel.arena import (
    BATCH,
    BLOCK_UNIT,
    MAX_TIERS,
    MEMORY,
    Blocks,
    Bytes,
    Done,
    Ids,
    Moves,
    no_such_block,
)
from tierd.tiers.fence import DEADLINE_S, Fence
from tierd.tiers.plugin import Tier

TIMEOUT_S = 30.0
MOVERS = 2
"""While one copies, the other's tier works."""

_SHORT_S, _LONG_S = 20e-6, 2e-3
"""Between looks for a block that is held, at first and at last."""

_Step: TypeAlias = Callable[[int], Done]
"""Does something to the blocks from a place on."""


class Arena:
    """Blocks of `block_bytes`, with ids from 0, in tiers from the fastest to the slowest.

    Any thread may call anything. A call with several ids does what it does to one after the other:
    a failure leaves those before it done, but for acquire(), which then holds none.

    Args:
        block_bytes: a multiple of 64, and of each tier's granule.
        tiers: each is taken whole. At least one has addresses.
        blocks: how many ids there are; by default as many as there is room for.
        movers: threads that move blocks. Of each tier but the fastest so many slots are theirs.
        checksums: sum each block that is written, and check it when it is read, held or moved. On
            tiers without addresses blocks are always checked.
        deadline_s: a tier that takes longer for a call is fenced.
        daemon: the socket of a tierd that steers it; see connect().
        name: by which the daemon's operator knows it.

    Raises:
        TierFailed: a tier does not give what it said it has.
        TierdError: the arguments cannot be.
    """

    def __init__(
        self,
        block_bytes: int,
        tiers: Iterable[Tier],
        *,
        blocks: int | None = None,
        movers: int = MOVERS,
        checksums: bool = False,
        deadline_s: float = DEADLINE_S,
        daemon: str | os.PathLike[str] | None = None,
        name: str = "arena",
    ) -> None:
        self.name = name
        if block_bytes <= 0 or block_bytes % BLOCK_UNIT:
            raise TierdError(f"block_bytes {block_bytes} is no multiple of {BLOCK_UNIT}")
        if movers < 1:
            raise TierdError(f"movers {movers}: without one nothing can make way")
        self.block_bytes = block_bytes
        self._closed = False
        self._fences = _reserve(block_bytes, tiers, deadline_s)
        self._bandwidths = [Bandwidth() for _ in self._fences]
        try:
            self._set_up(blocks, movers, checksums)
        except BaseException:
            _free(self._fences)
            raise
        self._threads = [
            threading.Thread(
                target=move,
                args=(self._blocks, self._fences, self._bandwidths, number, block_bytes),
                daemon=True,
                name=f"mover {number}",
            )
            for number in range(1, movers + 1)
        ]
        for thread in self._threads:
            thread.start()
        # Also when the program ends: threads that copy must not outlive what they copy.
        self._steering: Steering | None = None
        self._stops: list[Callable[[], None]] = [
            self._blocks.stop,
            *(bandwidth.stop for bandwidth in self._bandwidths),
        ]
        self._end = weakref.finalize(
            self, _end, os.getpid(), self._stops, self._threads, self._fences
        )
        if daemon is not None:
            self.connect(daemon)

    def _set_up(self, blocks: int | None, movers: int, checksums: bool) -> None:
        spares = [min(movers, fence.slots - 1) if i else 0 for i, fence in enumerate(self._fences)]
        room = sum(fence.slots for fence in self._fences) - sum(spares)
        self.blocks = room if blocks is None else blocks
        if not 0 < self.blocks <= MOST_BLOCKS:
            raise TierdError(f"blocks {self.blocks}: from 1 to {MOST_BLOCKS}")
        told = [
            SharedTier(
                name=fence.name,
                kind=fence.facts.kind,
                slots=fence.slots,
                latency_ns=fence.facts.latency_ns,
                gives_back=fence.gives_back,
            )
            for fence in self._fences
        ]
        self.shared = Shared.create(self.block_bytes, self.blocks, told)
        self._blocks = Blocks(
            self.block_bytes, self.shared.counts, self.shared.places, sums=checksums
        )
        for fence, spare in zip(self._fences, spares, strict=True):
            address = 0 if fence.device is None else fence.device.address
            self._blocks.add_tier(fence.memory, fence.slots, spare, address)
        self._memories = [fence.memory for fence in self._fences if fence.memory is not None]
        self._in_memory = [i for i, fence in enumerate(self._fences) if fence.memory is not None]
        self._room = [
            fence.slots - spare for fence, spare in zip(self._fences, spares, strict=True)
        ]
        self._anywhere = Place(room=sum(self._room[i] for i in self._in_memory))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the moves and gives the tiers back. What is held can still be used."""
        self._closed = True
        self._end()

    @property
    def tiers(self) -> tuple[str, ...]:
        """Their names, the fastest first."""
        return tuple(fence.name for fence in self._fences)

    @property
    def on_devices(self) -> tuple[str, ...]:
        """The tiers whose blocks have addresses for a device alone."""
        return tuple(fence.name for fence in self._fences if fence.device is not None)

    @property
    def fenced(self) -> dict[str, str]:
        """The tiers that have failed, and how. They get no more blocks."""
        return {fence.name: fence.failure for fence in self._fences if fence.failure is not None}

    @property
    def limits(self) -> dict[str, float]:
        """The MiB a second that movers keep to, of each tier where they do."""
        found = {
            fence.name: bandwidth.mbps
            for fence, bandwidth in zip(self._fences, self._bandwidths, strict=True)
        }
        return {name: mbps for name, mbps in found.items() if mbps is not None}

    def limit(self, tier: str, mbps: float | None) -> None:
        """Has movers copy no more to and from a tier, from now on; None ends that.

        All that is copied counts, also what is waited for. A daemon may set a limit of its own, and
        the lower one holds.

        Args:
            tier: one without addresses; others are used in place.
            mbps: MiB a second, above 0.

        Raises:
            TierdError: the tier has addresses, or the limit cannot be.
        """
        rank = self._rank(tier)
        fence = self._fences[rank]
        if fence.memory is not None or fence.device is not None:
            raise TierdError(f"blocks on {tier} have addresses: what uses them has no limit")
        if mbps is not None and not 0 < mbps < float("inf"):
            raise TierdError(
                f"limit {mbps} of {tier}: MiB a second, above 0", hint="None ends a limit"
            )
        self._bandwidths[rank].limit(Setter.PROGRAM, mbps)

    def connect(self, daemon: str | os.PathLike[str]) -> None:
        """Lets a tierd see its counts and places, and tell where blocks are best, from now on.

        It is looked for in a thread of the arena's, again and again: it may come later, or go.

        Args:
            daemon: its socket, such as /run/tierd/arena.sock.

        Raises:
            TierdError: the arena is closed, or connected already.
        """
        if self._closed or self._steering is not None:
            why = "closed" if self._closed else "connected to a daemon already"
            raise TierdError(f"the arena is {why}")
        steering = Steering(
            self._blocks,
            self.shared,
            self._bandwidths,
            partial(give_back, self._blocks, self._fences),
            Path(daemon),
            self.name,
        )
        thread = threading.Thread(target=steering.run, daemon=True, name="steering")
        self._steering = steering
        thread.start()
        self._stops.append(steering.stop)
        self._threads.append(thread)

    @property
    def steered(self) -> Steered | None:
        """What a daemon does for it; None without connect()."""
        return None if self._steering is None else self._steering.steered

    def moves(self) -> Moves:
        """Tells what the movers have done."""
        return self._blocks.moves()

    def touch(self, ids: ArrayLike) -> None:
        """Counts an access of each block: for who uses what it holds for long."""
        self._blocks.touch(self._ids(ids))

    def acquire(
        self,
        ids: ArrayLike,
        *,
        write: bool = False,
        on: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Held:
        """Holds blocks, which then stay where they are, and counts an access of each.

        A block that was never written can be acquired for writing; it is of zeros then.

        Args:
            ids: the blocks.
            write: alone, to change them.
            on: the tier to have them on, which is brought there what is not. By default any that
                the CPU reaches.
            timeout_s: at most so long it waits for those that are held or elsewhere.

        Raises:
            NotFound: a block was never written, or there is none of this id.
            Busy: it is held by others: by a writer, or for a writer by anybody, also by the caller.
            NoRoom: memory, or the tier, is too small for it and all that is held.
            TierFailed: it is on a tier that does not give it, or is to be on one that has failed.
            Damaged: it is not what was written.
        """
        ids = self._ids(ids)
        where = self._anywhere if on is None else self._place(on)
        if len(ids) > where.room:
            raise NoRoom(
                f"{len(ids)} blocks are to be held, {where.tier} has room for {where.room}",
                hint=f"acquire fewer at a time, or make the arena's {where.tier} larger",
            )
        addresses = np.empty(len(ids), np.uint64)
        done, why = self._blocks.pin(ids, addresses, write=write, on=where.on)
        if why:
            self._finish_pinning(ids, addresses, (done, why), write, where, timeout_s)
        return Held(self._blocks, ids, addresses, self._memories, where, write=write)

    def _place(self, tier: str) -> Place:
        rank = self._rank(tier)
        fence = self._fences[rank]
        if fence.memory is None and fence.device is None:
            raise TierdError(
                f"blocks on {tier} have no addresses to be held at",
                hint="acquire them without `on`: they come to memory",
            )
        if fence.failure is not None:
            raise TierFailed(f"tier {tier} is fenced: {fence.failure}")
        number = None if fence.device is None else fence.device.number
        return Place(on=rank, tier=tier, room=self._room[rank], device=number)

    def _finish_pinning(
        self,
        ids: Ids,
        addresses: NDArray[np.uint64],
        begun: Done,
        write: bool,
        where: Place,
        timeout_s: float,
    ) -> None:
        pinned = begun[0]
        is_alone = not write or len(np.unique(ids)) == len(ids)

        def step(first: int) -> Done:
            nonlocal pinned
            done, why = self._blocks.pin(ids[first:], addresses[first:], write=write, on=where.on)
            pinned = first + done
            return done, why

        try:
            if not is_alone:
                raise TierdError("a block that is to be written is given twice")
            self._finish(step, ids, timeout_s, begun, where)
        except BaseException:
            self._blocks.unpin(ids[:pinned], write=write)
            raise

    def read(
        self, ids: ArrayLike, into: Bytes | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> Bytes:
        """Copies blocks out, each as it was at one moment, and counts an access of each.

        Args:
            ids: the blocks.
            into: where to, shape (len(ids), block_bytes), contiguous; a new array by default.
            timeout_s: at most so long it waits for those that are held or elsewhere.

        Raises:
            NotFound, Busy, NoRoom, TierFailed, Damaged: as acquire().
        """
        ids = self._ids(ids)
        if into is None:
            into = np.empty((len(ids), self.block_bytes), np.uint8)
        data = self._data(into, ids)
        self._finish(lambda first: self._blocks.read(ids[first:], data[first:]), ids, timeout_s)
        return data

    def write(self, ids: ArrayLike, data: NDArray[Any], *, timeout_s: float = TIMEOUT_S) -> None:
        """Replaces blocks whole, and counts an access of each.

        Args:
            ids: the blocks.
            data: len(ids) blocks, contiguous, of any dtype.
            timeout_s: as of read().

        Raises:
            Busy, NoRoom, TierFailed: as acquire().
        """
        ids = self._ids(ids)
        source = self._data(data, ids)
        self._finish(lambda first: self._blocks.write(ids[first:], source[first:]), ids, timeout_s)

    def discard(self, ids: ArrayLike, *, timeout_s: float = TIMEOUT_S) -> None:
        """Gives blocks up, and what they hold; their ids can be written anew.

        Raises:
            NotFound: a block was never written, or given up already.
            Busy: it is held.
        """
        ids = self._ids(ids)
        self._finish(lambda first: self._blocks.drop(ids[first:]), ids, timeout_s)

    def prefetch(self, ids: ArrayLike, tier: str | None = None) -> int:
        """Has blocks brought to a tier, by default the fastest; what is not used there makes way.

        Returns:
            How many are to be moved: not those that are there, or wait to be moved already.
        """
        return self._blocks.want(self._ids(ids), 0 if tier is None else self._rank(tier))

    def demote(self, ids: ArrayLike, tier: str | None = None) -> int:
        """Has blocks brought to a tier, by default the slowest. Returns as prefetch()."""
        rank = len(self._fences) - 1 if tier is None else self._rank(tier)
        return self._blocks.want(self._ids(ids), rank)

    def give_back(self, tier: str | None = None) -> int:
        """Leaves what is free on a tier, by default the fastest, to others until it is used again.

        What is used then takes memory from where there is some: of a node that is full meanwhile,
        from another.

        Returns:
            How many bytes: 0 where the tier, or blocks of this size, cannot be given back.

        Raises:
            TierFailed: the tier did not do it.
        """
        rank = 0 if tier is None else self._rank(tier)
        return give_back(self._blocks, self._fences, rank) * self.block_bytes

    def wait(self, ids: ArrayLike, *, timeout_s: float = TIMEOUT_S) -> NDArray[np.int32]:
        """Waits until none of the blocks waits to be moved.

        Returns:
            What each one's last move came to: 0, or an errno: EBUSY where it was held or written,
            ENOSPC, EIO where a tier failed, EBADMSG where it is not what was written.

        Raises:
            Busy: it takes longer.
        """
        ids = self._ids(ids)
        outcomes = self._blocks.wait(ids, timeout_s)
        if outcomes is None:
            raise Busy(f"blocks were still moving after {timeout_s:g} s")
        return outcomes

    def places(self, ids: ArrayLike) -> NDArray[np.uint8]:
        """Tells the number of each block's tier, 255 where it is nowhere, as of this moment."""
        found: NDArray[np.uint8] = self.shared.places[self._in_range(self._ids(ids))]
        return found

    def counts(self, ids: ArrayLike) -> NDArray[np.uint32]:
        """Tells each block's accesses, modulo 2^32."""
        found: NDArray[np.uint32] = self.shared.counts[self._in_range(self._ids(ids))]
        return found

    def _finish(
        self,
        step: _Step,
        ids: Ids,
        timeout_s: float,
        begun: Done | None = None,
        where: Place | None = None,
    ) -> None:
        """Does a step, and what stands in its way, until it is done to all."""
        until = time.monotonic() + timeout_s
        where = where or self._anywhere
        done, why = step(0) if begun is None else begun
        obstacle, pause_s = why, _SHORT_S
        while why:
            if time.monotonic() >= until:
                raise self._give_up(obstacle, ids[done])
            obstacle = self._overcome(why, ids[done:], where, until, pause_s) or obstacle
            more, why = step(done)
            done += more
            pause_s = _SHORT_S if more else min(2 * pause_s, _LONG_S)

    def _overcome(self, why: int, ids: Ids, where: Place, until: float, pause_s: float) -> int:
        """Does something about what stands in the first id's way.

        Returns what that may still be: ENOSPC, EBUSY, or 0 where it is not known.
        """
        match why:
            case errno.ENOENT:
                raise NotFound(f"block {ids[0]} was never written")
            case errno.EBADMSG:
                raise Damaged(f"block {ids[0]} is not what was written")
            case errno.EXDEV:
                why = self._fetch(ids, where, until)
            case errno.ENOSPC:
                self._blocks.evict(min(len(ids), BATCH))
            case _:
                pass  # it is held: others release it
        if why:
            time.sleep(pause_s)
        return why

    def _fetch(self, ids: Ids, where: Place, until: float) -> int:
        """Brings blocks to a place: of memory to the fastest that can take the first one.

        As _overcome().
        """
        is_anywhere = where.on == MEMORY
        # What is fetched along with a block must not make it go again.
        ids = ids[: max(1, min(BATCH, where.room // 4))]
        for tier in self._in_memory if is_anywhere else [where.on]:
            self._blocks.want(ids, tier, urgent=True, absent=is_anywhere)
            outcomes = self._blocks.wait(ids[:1], max(0.0, until - time.monotonic()))
            outcome = 0 if outcomes is None else int(outcomes[0])
            if outcome == errno.EIO:
                is_to = not is_anywhere and self._fences[tier].failure is not None
                what = f"to be on {where.tier}" if is_to else "on a tier that does not give it"
                raise TierFailed(
                    f"block {ids[0]} is {what}: {self._troubles()}",
                    hint="it stays where it is: try again when the tier is well",
                )
            if outcome == errno.EBADMSG:
                is_lost = any(isinstance(fence.trouble, Lost) for fence in self._fences)
                what = "lost" if is_lost else "not what was stored"
                raise Damaged(
                    f"block {ids[0]} is {what}: {self._troubles()}",
                    hint="discard it, and write it anew",
                )
            if outcome != errno.ENOSPC:
                return outcome
        return errno.ENOSPC

    def _give_up(self, obstacle: int, block: np.int64) -> TierdError:
        if any(isinstance(fence.trouble, Busy) for fence in self._fences):
            return Busy(f"block {block} waits for a tier: {self._troubles()}")
        if obstacle == errno.ENOSPC:
            return NoRoom(
                f"block {block}: every tier is full, or all that could make way is held",
                hint="discard or release blocks, or make a tier larger",
            )
        return Busy(f"block {block} is held by others, or on its way")

    def _troubles(self) -> str:
        found = {fence.name: fence.failure or fence.trouble for fence in self._fences}
        return "; ".join(f"{name}: {why}" for name, why in found.items() if why)

    def _ids(self, ids: ArrayLike) -> Ids:
        if self._closed:
            raise TierdError("the arena is closed")
        found = np.asarray(ids)
        if found.dtype != np.int64 or found.ndim != 1 or not found.flags.c_contiguous:
            if found.size and found.dtype.kind not in "iu":
                raise TierdError(f"ids are whole numbers, not {found.dtype}")
            found = np.ascontiguousarray(found.reshape(-1), np.int64)
        return found

    def _in_range(self, ids: Ids) -> Ids:
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.blocks:
            raise no_such_block(ids, self.blocks)
        return ids

    def _rank(self, tier: str) -> int:
        if tier not in self.tiers:
            raise NotFound(f"no tier {tier!r}", hint=f"there are: {', '.join(self.tiers)}")
        return self.tiers.index(tier)

    def _data(self, data: NDArray[Any], ids: Ids) -> Bytes:
        wanted = len(ids) * self.block_bytes
        if not data.flags.c_contiguous or data.nbytes != wanted:
            raise TierdError(
                f"{data.nbytes} bytes for {len(ids)} blocks of {self.block_bytes}, contiguous"
            )
        return data.reshape(-1).view(np.uint8).reshape(len(ids), self.block_bytes)


def _reserve(block_bytes: int, tiers: Iterable[Tier], deadline_s: float) -> list[Fence]:
    fences: list[Fence] = []
    try:
        for tier in tiers:
            fences.append(Fence(tier, deadline_s))
            fences[-1].reserve(block_bytes)
        if not 0 < len(fences) <= MAX_TIERS:
            raise TierdError(f"{len(fences)} tiers: from one to {MAX_TIERS}")
        if len({fence.name for fence in fences}) < len(fences):
            raise TierdError("two tiers have the same name")
        if all(fence.memory is None for fence in fences):
            raise TierdError("no tier has addresses", hint="add one of memory, such as dram")
    except BaseException:
        _free(fences)
        raise
    return fences


def _free(fences: Sequence[Fence]) -> None:
    for fence in fences:
        fence.free()


def _end(
    owner: int,
    stops: Sequence[Callable[[], None]],
    threads: Sequence[threading.Thread],
    fences: Sequence[Fence],
) -> None:
    if os.getpid() != owner:
        return  # a fork has none of the threads, and a lock that one of them may hold
    for stop in stops:
        stop()
    for thread in threads:
        thread.join()
    _free(fences)
