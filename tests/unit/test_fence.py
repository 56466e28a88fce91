# SPDX-License-Identifier: Apache-2.0
"""What a plugin can do wrong, and that it ends at the fence."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.drawer import Drawer
from tierd.errors import Busy, Lost, TierdError, TierFailed
from tierd.model import TierKind
from tierd.tiers.fence import Fence
from tierd.tiers.plugin import Facts, Health

BLOCK = 64
SLOTS = np.arange(3)
DATA = np.arange(3 * BLOCK, dtype=np.uint8).reshape(3, BLOCK)


@pytest.fixture
def drawer() -> Drawer:
    return Drawer(8, BLOCK)


@pytest.fixture
def fence(drawer: Drawer) -> Iterator[Fence]:
    fence = Fence(drawer, deadline_s=0.2)
    fence.reserve(BLOCK)
    yield fence
    fence.free()


def test_what_is_stored_is_loaded(fence: Fence) -> None:
    into = np.zeros_like(DATA)
    fence.store(SLOTS, DATA)
    fence.load(SLOTS, into)
    assert (into == DATA).all()
    assert (fence.slots, fence.failure) == (8, None)


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), SystemExit(1), KeyboardInterrupt()]
)
def test_one_that_raises(fence: Fence, drawer: Drawer, error: BaseException) -> None:
    def fail() -> None:
        raise error

    drawer.on_store = fail
    with pytest.raises(TierFailed, match=f"tier drawer: store: {type(error).__name__}"):
        fence.store(SLOTS, DATA)
    drawer.on_store = lambda: None
    with pytest.raises(TierFailed, match="is fenced: store"):
        fence.store(SLOTS, DATA)


@pytest.mark.parametrize(
    "error", [Busy("the donors are away"), Lost("no donor has slot 1", SLOTS[1:2])]
)
def test_one_that_cannot_now_or_has_lost_some_has_not_failed(
    fence: Fence, drawer: Drawer, error: TierdError
) -> None:
    def fail() -> None:
        raise error

    fence.store(SLOTS, DATA)
    drawer.on_load = drawer.on_store = fail
    for call in (fence.load, fence.store):
        with pytest.raises(type(error), match=str(error)):
            call(SLOTS, np.zeros_like(DATA))
    assert (fence.failure, fence.trouble) == (None, error)
    drawer.on_load = drawer.on_store = lambda: None
    fence.store(SLOTS, DATA)
    assert fence.trouble is None


def test_what_is_on_a_fenced_tier_is_read(fence: Fence, drawer: Drawer) -> None:
    fence.store(SLOTS, DATA)
    drawer.short = 1
    with pytest.raises(TierFailed, match="store: 2 of 3 blocks"):
        fence.store(SLOTS, DATA)
    drawer.short = 0
    into = np.zeros_like(DATA)
    fence.load(SLOTS, into)
    assert (into == DATA).all()


def wait(gate: threading.Event) -> None:
    assert gate.wait(30)


def test_one_that_is_late_is_not_called_before_it_returns(fence: Fence, drawer: Drawer) -> None:
    gate = threading.Event()
    drawer.on_load = lambda: wait(gate)
    fence.store(SLOTS, DATA)
    into = np.zeros_like(DATA)
    with pytest.raises(TierFailed, match=r"load: no answer in 0.2 s"):
        fence.load(SLOTS, into)
    calls = drawer.calls
    with pytest.raises(TierFailed, match="load: an earlier call has not returned yet"):
        fence.load(SLOTS, into)
    assert drawer.calls == calls
    assert not into.any()
    late = fence._late
    assert late is not None
    gate.set()
    assert late.ready.wait(30)
    fence.load(SLOTS, into)
    assert (into == DATA).all()


@pytest.mark.parametrize("answer", [None, 2, 4, "3", [3]])
def test_one_that_answers_otherwise(drawer: Drawer, answer: object) -> None:
    drawer.store = lambda slots, data: answer  # type: ignore[assignment,method-assign,return-value]
    fence = Fence(drawer)
    fence.reserve(BLOCK)
    with pytest.raises(TierFailed, match=r"store: .* of 3 blocks"):
        fence.store(SLOTS, DATA)
    fence.free()


@pytest.mark.parametrize("state", [Health.FULL, Health.FAILED])
def test_one_that_is_ill_gets_nothing(fence: Fence, drawer: Drawer, state: Health) -> None:
    drawer.state = state
    with pytest.raises(TierFailed, match=f"its health is {state}"):
        fence.store(SLOTS, DATA)
    assert drawer.calls == 0


class Lies(Drawer):
    """Reserves what it is told to, whatever it was asked for."""

    def __init__(self, slots: object, memory: object = None) -> None:
        super().__init__(8, BLOCK)
        self.slots, self.memory = slots, memory  # type: ignore[assignment]

    @property
    def facts(self) -> Facts:
        return Facts(name="lies", kind=TierKind.SWAP, capacity_bytes=8 * BLOCK)

    def reserve(self, block_bytes: int, slots: int) -> Drawer:
        return self


def frozen() -> NDArray[np.uint8]:
    memory = np.zeros((8, BLOCK), np.uint8)
    memory.flags.writeable = False
    return memory


@pytest.mark.parametrize("slots", [0, -1, 9, None, 8.0])
def test_one_that_lies_about_its_slots(slots: object) -> None:
    with pytest.raises(TierFailed, match="slots of 8"):
        Fence(Lies(slots)).reserve(BLOCK)


@pytest.mark.parametrize(
    "memory",
    [
        np.zeros((7, BLOCK), np.uint8),
        np.zeros((8, BLOCK), np.uint16),
        np.zeros((8, 2 * BLOCK), np.uint8)[:, ::2],
        frozen(),
        bytes(8 * BLOCK),
    ],
)
def test_one_that_lies_about_its_memory(memory: object) -> None:
    with pytest.raises(TierFailed, match="its memory is not 8 blocks"):
        Fence(Lies(8, memory)).reserve(BLOCK)


def test_one_with_fewer_slots_than_its_capacity() -> None:
    """It is believed, as long as it says so."""
    fence = Fence(Lies(5))
    fence.reserve(BLOCK)
    assert fence.slots == 5


def test_a_block_that_does_not_fit(drawer: Drawer) -> None:
    with pytest.raises(TierFailed, match="less than a block"):
        Fence(drawer).reserve(16 * BLOCK)
    with pytest.raises(TierFailed, match="no multiple of 64"):
        Fence(drawer).reserve(BLOCK + 8)


@pytest.mark.parametrize(
    "facts",
    [
        None,
        "fast",
        Facts(name="", kind=TierKind.DRAM, capacity_bytes=1),
        Facts(name="far", kind=TierKind.DRAM, capacity_bytes=1, latency_ns=-3),
    ],
)
def test_one_that_tells_nothing_of_itself(facts: object) -> None:
    class Silent(Drawer):
        @property
        def facts(self) -> Facts:
            return facts  # type: ignore[return-value]

    with pytest.raises(TierFailed, match=r"its facts are|its name|its latency -3 is no"):
        Fence(Silent(8, BLOCK))


def test_a_fence_that_is_freed_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    fence = Fence(Drawer(8, BLOCK))
    fence.reserve(BLOCK)
    (thread,) = set(threading.enumerate()) - before
    fence.free()
    thread.join(30)
    assert not thread.is_alive()
