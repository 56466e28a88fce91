# SPDX-License-Identifier: Apache-2.0
"""Weights of experts, of which a router selects a few for each token.

What a router will select in the next layer is guessed well by its weights on this layer's input: so
the next layer's experts can come while this one works. A wrong guess costs bandwidth; what was not
foreseen is fetched, or used where it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from tierd.arena import Arena, Held
from tierd.errors import NotFound, TierdError
from tierd.uses.matrices import Matrices, Parts
from tierd.uses.rows import Ids, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Selections:
    """In experts: of those `used`, `foreseen` were predicted, `ready` were in the fastest tier.

    `asked` were to be moved for a prediction, `wasted` were predicted and not selected.
    """

    used: int = 0
    foreseen: int = 0
    ready: int = 0
    asked: int = 0
    wasted: int = 0


class Selected:
    """Experts that stay where they are until release(); a context.

    `selected[i]` are the weights of the i-th one.
    """

    def __init__(self, held: Held, experts: Ids, matrices: Matrices) -> None:
        self.held, self.experts, self._matrices = held, experts, matrices

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, number: int) -> Parts:
        return self._matrices.parts(
            self.held, range(len(self))[number] * self._matrices.blocks_each
        )

    def __iter__(self) -> Iterator[tuple[int, Parts]]:
        """Yields the number of each expert and its weights."""
        return ((int(expert), self[at]) for at, expert in enumerate(self.experts))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self.held.release()


class Experts:
    """The experts of all layers, each in blocks of its own; for one thread at a time.

    Args:
        arena: has the blocks.
        layers: of experts, numbered from 0.
        experts: in each.
        shape: of an expert's weights, (rows, ...); of several matrices, flat: (numbers,).
        dtype: of them; bfloat16 goes as uint16.
        first_block: as of Matrices.

    Raises:
        TierdError, NotFound: as Matrices.
    """

    def __init__(
        self,
        arena: Arena,
        layers: int,
        experts: int,
        shape: tuple[int, ...],
        dtype: DTypeLike = np.uint16,
        *,
        first_block: int = 0,
    ) -> None:
        if layers < 1 or experts < 1:
            raise TierdError(f"{layers} layers of {experts} experts: nothing is to be kept")
        self.layers, self.experts = layers, experts
        self._arena = arena
        self._matrices = Matrices(arena, layers * experts, shape, dtype, first_block)
        self._first_block = first_block
        self._ahead = arena.shared.tiers[0].slots // 2
        self._is_predicted = np.zeros((layers, experts), np.bool_)
        self._counts = dict.fromkeys(Selections.__slots__, 0)

    @property
    def selections(self) -> Selections:
        return Selections(**self._counts)

    def write(self, layer: int, expert: int, values: NDArray[Any]) -> None:
        """Replaces an expert's weights.

        Raises:
            NotFound, NoRoom: no such layer or expert; the arena's tiers are too small.
            TierdError: of another shape or dtype.
        """
        self._matrices.write(self._number(layer, [expert])[0], values)

    def read(self, layer: int, expert: int) -> NDArray[Any]:
        """Copies an expert's weights out."""
        return self._matrices.read(self._number(layer, [expert])[0])

    def predict(self, layer: int, experts: ArrayLike) -> int:
        """Has experts brought to the fastest tier that are to be selected soon.

        Args:
            layer: of which.
            experts: the likeliest first: no more than half of the tier is used for them.

        Returns:
            How many of them are to be moved.

        Raises:
            NotFound: no such layer or expert.
        """
        found = self._number(layer, experts)
        blocks = self._blocks(found[: self._ahead // self._matrices.blocks_each])
        is_below = ~self._is_fast(blocks)
        self._arena.prefetch(blocks[is_below].reshape(-1))
        self._is_predicted[layer, found[: len(blocks)] - layer * self.experts] = True
        asked = int(np.count_nonzero(is_below))
        self._counts["asked"] += asked
        return asked

    def acquire(self, layer: int, experts: ArrayLike) -> Selected:
        """Holds the experts that were selected, in this order.

        What was predicted of the layer counts as wasted if it isn't among them.

        Raises:
            NotFound: no such layer or expert, or one was never written.
            NoRoom: memory is too small for all of them.
        """
        found = self._number(layer, experts)
        blocks = self._blocks(found)
        is_ready = self._is_fast(blocks)
        held = self._arena.acquire(blocks.reshape(-1))
        row = self._is_predicted[layer]
        chosen = found - layer * self.experts
        foreseen = int(np.count_nonzero(row[chosen]))
        row[chosen] = False
        self._count(len(found), foreseen, int(np.count_nonzero(is_ready)), int(row.sum()))
        row[:] = False
        return Selected(held, chosen, self._matrices)

    def _is_fast(self, blocks: Ids) -> NDArray[np.bool_]:
        """Which experts have all of their blocks in the fastest tier."""
        places = self._arena.places(blocks).reshape(blocks.shape)
        is_fast: NDArray[np.bool_] = np.all(places == 0, axis=1)
        return is_fast

    def _count(self, used: int, foreseen: int, ready: int, wasted: int) -> None:
        self._counts["used"] += used
        self._counts["foreseen"] += foreseen
        self._counts["ready"] += ready
        self._counts["wasted"] += wasted

    def _number(self, layer: int, experts: ArrayLike) -> Ids:
        if not 0 <= layer < self.layers:
            raise NotFound(
                f"there is no layer {layer}", hint=f"they are numbered from 0 to {self.layers - 1}"
            )
        return layer * self.experts + numbers(experts, self.experts, "expert")

    def _blocks(self, found: Ids) -> Ids:
        """Of each expert its blocks: (experts, blocks of each)."""
        each = self._matrices.blocks_each
        blocks: Ids = self._first_block + found[:, None] * each + np.arange(each)
        return blocks
