# SPDX-License-Identifier: Apache-2.0
"""Layers, experts and optimizer states: what NumPy has of them, wherever they are."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.drawer import Drawer
from tierd.arena import Arena
from tierd.errors import Busy, NoRoom, NotFound, TierdError
from tierd.tiers.memory import cxl, dram
from tierd.uses import Experts, Layers, OptimizerStates

BLOCK = 1024


def some_weights(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


@pytest.fixture(params=["memory", "drawer"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    slow = cxl(48 * BLOCK) if request.param == "memory" else Drawer(48, BLOCK)
    with Arena(BLOCK, [dram(16 * BLOCK), slow], checksums=True) as arena:
        yield arena


@pytest.mark.parametrize("look_ahead", [True, False])
@pytest.mark.parametrize("shape", [(50, 12), (16, 16), (300,)])
def test_a_sweep_is_the_product_of_the_layers(
    arena: Arena, shape: tuple[int, ...], look_ahead: bool
) -> None:
    weights = some_weights(10, *shape)
    layers = Layers(arena, 10, shape, np.float32, first_block=3, look_ahead=look_ahead)
    for number, values in enumerate(weights):
        layers.write(number, values)
    vector = some_weights(*shape[1:], 2) if len(shape) > 1 else np.float32(3)
    for _ in range(3):
        for number, parts in layers.sweep():
            product = np.concatenate([part @ vector if len(shape) > 1 else part for part in parts])
            whole = weights[number]
            expected = whole @ vector if len(shape) > 1 else whole
            np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)
    assert (layers.read(7) == weights[7]).all()
    seen = layers.foresight
    assert seen.ready + seen.late == (3 * layers.blocks if look_ahead else 0)


def test_layers_of_which_two_do_not_fit(arena: Arena) -> None:
    with pytest.raises(NoRoom, match="two layers of 9 blocks, 16 have room"):
        Layers(arena, 3, (9, 256), np.float32)
    with pytest.raises(NotFound, match="64 blocks from 0 on"):
        Layers(arena, 64, (256,), np.float32)


def some_experts(arena: Arena) -> tuple[Experts, NDArray[np.float32]]:
    """Two layers of five, each in three blocks."""
    weights = some_weights(2, 5, 20, 32)
    experts = Experts(arena, 2, 5, (20, 32), np.float32, first_block=1)
    for layer in range(2):
        for expert in range(5):
            experts.write(layer, expert, weights[layer, expert])
    return experts, weights


def test_experts_are_as_they_were_written(arena: Arena) -> None:
    experts, weights = some_experts(arena)
    for layer, chosen in ((0, [4, 1]), (1, [3, 0]), (0, [2]), (1, [])):
        experts.predict(layer, [1, 2])
        with experts.acquire(layer, chosen) as selected:
            assert [expert for expert, _ in selected] == chosen
            for expert, parts in selected:
                assert (np.concatenate(parts) == weights[layer, expert]).all()
                assert not parts[0].flags.writeable
    assert (experts.read(1, 4) == weights[1, 4]).all()


def test_what_the_router_foresees_is_there(arena: Arena) -> None:
    experts, _ = some_experts(arena)
    every = np.arange(1, 31)
    arena.demote(every)
    arena.wait(every)
    assert experts.predict(1, [2, 3]) == 2
    arena.wait(every)
    with experts.acquire(1, [3, 4]) as selected:
        with pytest.raises(Busy):
            arena.write(selected.held.ids[:1], np.zeros(BLOCK, np.uint8), timeout_s=0)
        before = arena.places(selected.held.ids)
        arena.demote(selected.held.ids)
        arena.wait(selected.held.ids)
        assert (arena.places(selected.held.ids) == before).all()
    told = experts.selections
    assert (told.used, told.foreseen, told.ready, told.asked, told.wasted) == (2, 1, 1, 2, 1)
    experts.acquire(1, [2]).release()
    assert experts.selections.wasted == 1, "it is wasted once"


def test_predictions_take_half_of_the_fastest_tier(arena: Arena) -> None:
    experts, _ = some_experts(arena)
    every = np.arange(1, 31)
    arena.demote(every)
    arena.wait(every)
    assert experts.predict(0, [4, 3, 2, 1]) == 2
    arena.wait(every)
    assert np.flatnonzero(arena.places(every) == 0).tolist() == [9, 10, 11, 12, 13, 14]


def test_experts_that_there_are_none_of(arena: Arena) -> None:
    experts, weights = some_experts(arena)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: experts.acquire(2, [0]), "no layer 2"),
        (lambda: experts.predict(-1, [0]), "no layer -1"),
        (lambda: experts.acquire(0, [1, 5]), "no expert 5"),
        (lambda: experts.read(0, -1), "no expert -1"),
    ]
    for call, told in calls:
        with pytest.raises(NotFound, match=told):
            call()
    with pytest.raises(TierdError, match=r"matrix 5: float32 \(32,\), not float32 \(20, 32\)"):
        experts.write(1, 0, weights[0, 0, 0])
    with pytest.raises(TierdError, match="nothing is to be kept"):
        Experts(arena, 0, 5, (4,))
    assert experts.selections.used == 0


def adamw(
    weights: NDArray[np.float32],
    gradient: NDArray[np.float32],
    m: NDArray[np.float32],
    v: NDArray[np.float32],
    step: int,
) -> None:
    """In place: Loshchilov and Hutter's algorithm 2."""
    rate, decay, beta1, beta2 = np.float32(1e-2), np.float32(0.1), np.float32(0.9), np.float32(0.99)
    m *= beta1
    m += (1 - beta1) * gradient
    v *= beta2
    v += (1 - beta2) * gradient**2
    ahead = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + np.float32(1e-8))
    weights -= rate * (ahead + decay * weights)


@pytest.mark.parametrize("look_ahead", [True, False])
def test_adamw_is_numpys(arena: Arena, look_ahead: bool) -> None:
    elements = 40 * 128 + 7
    states = OptimizerStates(arena, elements, first_block=2, look_ahead=look_ahead)
    weights = some_weights(elements)
    expected = weights.copy()
    m, v = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    for step in range(1, 4):
        gradient = np.sin(expected * step)
        adamw(expected, gradient, m, v, step)
        for part in states.step():
            cut = slice(part.first, part.end)
            adamw(weights[cut], gradient[cut], part.states["m"], part.states["v"], step)
    assert (weights == expected).all()
    assert (states.read("m") == m).all()
    assert (states.read("v") == v).all()
    assert states.blocks == 41
    assert (states.foresight.ready + states.foresight.late > 0) == look_ahead


def test_a_step_that_is_given_up_lets_go(arena: Arena) -> None:
    states = OptimizerStates(arena, 1000, ["momentum"], np.float64)
    for part in states.step():
        part.states["momentum"][:] = 1
        if part.first:
            break
    del part
    assert states.read("momentum").sum() == 256
    for part in states.step():
        part.states["momentum"][:] += 1
    assert states.read("momentum").sum() == 1256


def test_states_from_a_checkpoint(arena: Arena) -> None:
    states = OptimizerStates(arena, 1000, ["a", "b", "c"])
    assert not states.read("b").any()
    values = some_weights(1000)
    states.write("b", values)
    assert (states.read("b") == values).all()
    assert not states.read("c").any()
    with pytest.raises(NotFound, match="no state 'd'"):
        states.read("d")
    with pytest.raises(TierdError, match=r"state a: float64 \(1000,\)"):
        states.write("a", np.zeros(1000))
    with pytest.raises(TierdError, match="no name twice"):
        OptimizerStates(arena, 10, ["m", "m"])
