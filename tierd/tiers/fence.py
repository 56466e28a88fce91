# SPDX-License-Identifier: Apache-2.0
"""A fence around a tier: whatever its plugin does, it ends here, in time, and as TierFailed.

A plugin's calls run one by one in a thread of its own. One that is late is given up: nothing is
called before it has returned, and nobody looks at what it still does. So its arguments must not be
used again (see `Fence.has`). A tier that has failed once gets no more blocks; what is on it is
still read, since it is nowhere else. One that says that it is Busy, or what it has Lost, has not
failed.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierd.errors import Busy, Lost, TierdError, TierFailed
from tierd.tiers.plugin import DeviceMemory, Facts, Health, Space, Tier

T = TypeVar("T")

DEADLINE_S = 10.0
NAME_BYTES = 24

_Job = tuple[Callable[..., Any], tuple[Any, ...], "_Answer"]


class _Answer:
    """What a call came to."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.data: object = None
        self.value: Any = None
        self.error: BaseException | None = None


def _serve(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        call, arguments, answer = job
        try:
            answer.value = call(*arguments)
        except BaseException as error:  # noqa: BLE001  # also a plugin's SystemExit
            answer.error = error
        answer.ready.set()
        del job, call, arguments, answer


class Fence:
    """A tier, and its one space.

    Args:
        tier: a plugin's.
        deadline_s: how long each of its calls may take.

    Raises:
        TierFailed: it does not tell of itself what it should. So does each call, where the tier
            does not do what it is asked for.
    """

    def __init__(self, tier: Tier, deadline_s: float = DEADLINE_S) -> None:
        self.name = type(tier).__name__
        self.failure: str | None = None
        """Why it gets no more blocks, if so."""
        self.trouble: Busy | Lost | None = None
        """Of its last call, if so: it has not failed by that."""
        self.slots = 0
        self.memory: NDArray[np.uint8] | None = None
        self.device: DeviceMemory | None = None
        self.gives_back = False
        """Whether the memory of free slots can be others' meanwhile."""
        self._tier = tier
        self._space: Space | None = None
        self._deadline_s = deadline_s
        self._turn = threading.Lock()
        self._late: _Answer | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon: it may hang for ever, and must not keep the program from ending.
        threading.Thread(
            target=_serve, args=(self._jobs,), daemon=True, name=f"tier {self.name}"
        ).start()
        self.facts = self._facts()
        self.name = self.facts.name

    def _facts(self) -> Facts:
        facts: object = self._call("facts", lambda: self._tier.facts)
        if not isinstance(facts, Facts):
            raise self.fail(f"its facts are {_kind(facts)}")
        if not 0 < len(facts.name.encode()) <= NAME_BYTES:
            raise self.fail(f"its name {facts.name!r} is not of 1 to {NAME_BYTES} bytes")
        latency: object = facts.latency_ns
        if latency is not None and not (isinstance(latency, int) and latency > 0):
            raise self.fail(f"its latency {latency!r} is no number of nanoseconds")
        return facts

    def reserve(self, block_bytes: int) -> None:
        """Takes all of its capacity, in slots of a block.

        Raises:
            TierFailed: also where a block does not fit its granule, or it has room for none.
        """
        granule, capacity = self.facts.granule_bytes, self.facts.capacity_bytes
        if granule <= 0 or block_bytes % granule:
            raise TierFailed(
                f"tier {self.name}: a block of {block_bytes} bytes is no multiple of {granule}",
                hint="choose a block size that is",
            )
        wanted = capacity // block_bytes
        if wanted < 1:
            raise TierFailed(f"tier {self.name}: {capacity} bytes are less than a block")
        space = self._call("reserve", self._tier.reserve, block_bytes, wanted)
        slots: object = self._call("reserve", lambda: space.slots)
        memory: object = self._call("reserve", lambda: space.memory)
        device: object = self._call("reserve", lambda: getattr(space, "device", None))
        can_give_back: Callable[[], object] = getattr(space, "can_give_back", bool)
        gives_back: object = self._call("reserve", can_give_back)
        self._space = space
        if not isinstance(slots, int) or not 0 < slots <= wanted:
            raise self.fail(f"reserve: {slots} slots of {wanted}")
        if memory is not None and not _is_memory(memory, slots, block_bytes):
            raise self.fail(f"reserve: its memory is not {slots} blocks of {block_bytes} bytes")
        if not (device is None or (memory is None and _is_device(device))):
            raise self.fail(f"reserve: {device} is no memory of a device alone")
        self.facts = self._facts()  # a tier may know its speed only now
        self.slots, self.memory, self.device = slots, memory, device
        self.gives_back = gives_back is True

    def adopt(self, buffer: NDArray[np.uint8]) -> None:
        """Tells of memory that store() and load() will get parts of. One that fails is fenced."""
        adopt: Callable[..., object] | None = getattr(self._space, "adopt", None)
        if adopt is not None and self.failure is None:
            with suppress(TierFailed):  # `failure` has it, and moves go on elsewhere
                self._call("adopt", adopt, buffer)

    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        """Copies blocks into slots.

        Raises:
            TierFailed: from now on it gets no more. `data` may still be read: see has().
            Busy: it stores nothing now, and may later.
        """
        if self.failure is not None:
            raise TierFailed(f"tier {self.name} is fenced: {self.failure}")
        self._all("store", len(slots), self._store_if_good, slots, data)

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        """Copies slots into blocks.

        Raises:
            TierFailed: `into` may still be written to, and is to be thrown away then: see has().
            Busy: it loads nothing now, and may later.
            Lost: some are gone, the others are loaded.
        """
        assert self._space is not None
        self._all("load", len(slots), self._space.load, slots, into)

    def give_back(self, slots: NDArray[np.int64]) -> None:
        """Frees the memory of slots that hold no blocks.

        Raises:
            TierFailed: it may still be freeing them: see has().
        """
        give_back: Callable[..., object] = getattr(self._space, "give_back")  # noqa: B009
        self._call("give_back", give_back, slots)

    def free(self) -> None:
        """Gives everything back, and ends. A plugin's failure to do so is only remembered."""
        try:
            if self._space is not None:
                self._call("free", self._space.free)
        except TierFailed:
            pass  # `failure` has it, and there is nothing left to be done
        self._jobs.put(None)

    def has(self, data: NDArray[Any]) -> bool:
        """Whether a call that was late may still use what it was given last."""
        late = self._late
        return late is not None and late.data is data and not late.ready.is_set()

    def fail(self, why: str) -> TierFailed:
        """Closes the fence; returns the error that says why."""
        if self.failure is None:
            self.failure = why
        return TierFailed(
            f"tier {self.name}: {why}",
            hint="it gets no more blocks; what is on it is read as long as it can be",
        )

    def _store_if_good(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        """Runs in the plugin's thread."""
        assert self._space is not None
        health = self._tier.health()
        if health is not Health.GOOD:
            raise TierdError(f"its health is {health}")
        return self._space.store(slots, data)

    def _all(self, name: str, count: int, call: Callable[..., Any], *arguments: Any) -> None:
        done: object = self._call(name, call, *arguments)
        if not (isinstance(done, int | np.integer) and done == count):
            raise self.fail(f"{name}: {done} of {count} blocks")

    def _call(self, name: str, call: Callable[..., T], *arguments: Any) -> T:
        with self._turn:  # each has it for no longer than the deadline
            if self._late is not None and not self._late.ready.is_set():
                raise self.fail(f"{name}: an earlier call has not returned yet")
            answer = _Answer()
            self._jobs.put((call, arguments, answer))
            if not answer.ready.wait(self._deadline_s):
                answer.data = arguments[-1] if arguments else None
                self._late = answer
                raise self.fail(f"{name}: no answer in {self._deadline_s:g} s")
            self._late = None
        if isinstance(answer.error, Busy | Lost):
            self.trouble = answer.error
            raise answer.error
        if answer.error is not None:
            raise self.fail(f"{name}: {_kind(answer.error)}: {answer.error}") from answer.error
        self.trouble = None
        value: T = answer.value
        return value


def _kind(thing: object) -> str:
    return type(thing).__name__


def _is_device(device: object) -> TypeGuard[DeviceMemory]:
    if not isinstance(device, DeviceMemory):
        return False
    numbers: tuple[object, object] = (device.address, device.number)
    return all(isinstance(number, int) for number in numbers) and 0 < device.address < 1 << 64


def _is_memory(memory: object, slots: int, block_bytes: int) -> TypeGuard[NDArray[np.uint8]]:
    return (
        isinstance(memory, np.ndarray)
        and memory.dtype == np.uint8
        and memory.shape == (slots, block_bytes)
        and memory.flags.c_contiguous
        and memory.flags.writeable
        and memory.ctypes.data % 64 == 0
    )
