# SPDX-License-Identifier: Apache-2.0
"""States of an optimizer in an arena: equal arrays, such as Adam's m and v, touched once a step.

A block has the same elements of each array, so that a step needs one block at a time, in an order
that is known: the next ones are fetched meanwhile, and what was written goes down behind.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tierd.arena import Arena, Foresight, Lookahead
from tierd.errors import NotFound, TierdError
from tierd.uses.rows import Ids, Rows, exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements `first` to before `end`; `states[name]` is that of a state, in place, to be written.

    It is held until the next part.
    """

    first: int
    end: int
    states: dict[str, NDArray[Any]]


class OptimizerStates:
    """Arrays of so many elements each, zeros at first; for one thread at a time.

    Args:
        arena: has the blocks.
        elements: of each array, such as a model's parameters.
        names: of the arrays.
        dtype: of them.
        first_block: they are in `blocks` blocks from this one on.
        look_ahead: have the next blocks fetched while the program works on one.

    Raises:
        TierdError: there are no names or elements, or a block has no room for one of each.
        NotFound: the arena has fewer blocks.
    """

    def __init__(
        self,
        arena: Arena,
        elements: int,
        names: Sequence[str] = ("m", "v"),
        dtype: DTypeLike = np.float32,
        *,
        first_block: int = 0,
        look_ahead: bool = True,
    ) -> None:
        if not names or len(set(names)) < len(names):
            raise TierdError(f"states {list(names)}: one at least, and no name twice")
        self.elements, self.names = elements, tuple(names)
        self._arena = arena
        self._rows = Rows(arena, elements, (len(names),), dtype, first_block)
        self.dtype = self._rows.dtype
        self.blocks = self._rows.blocks
        self._looks_ahead = look_ahead
        self._ahead: Lookahead | None = None

    @property
    def ids(self) -> Ids:
        """The arena's blocks that it has."""
        return self._rows.ids

    @property
    def foresight(self) -> Foresight:
        """What came of looking ahead, in blocks."""
        return Foresight() if self._ahead is None else self._ahead.foresight

    def step(self) -> Iterator[Part]:
        """Yields every part in turn, each held for writing during its turn of the loop.

        Raises:
            NoRoom, Busy: the arena's tiers are too small; others hold a block.
        """
        if self._looks_ahead and self._ahead is None:
            self._ahead = Lookahead(self._arena, self.ids, repeats=True)
        acquire = self._arena.acquire if self._ahead is None else self._ahead.acquire
        for at, block in enumerate(self.ids):
            with acquire([block], write=True) as held:
                yield self._part(at, held[0])

    def read(self, name: str) -> NDArray[Any]:
        """Copies a state out: (elements,). Such as was never stepped is zeros.

        Raises:
            NotFound: there is none of this name.
        """
        self._check(name)
        out = np.zeros(self.elements, self.dtype)
        written = self.ids[self._arena.places(self.ids) < len(self._arena.tiers)]
        for block in written:
            with self._arena.acquire([block]) as held:
                part = self._part(int(block) - self._rows.first_block, held[0])
                out[part.first : part.end] = part.states[name]
        return out

    def write(self, name: str, values: NDArray[Any]) -> None:
        """Replaces a state, as from a checkpoint: (elements,), of its dtype.

        Raises:
            NotFound: there is none of this name.
            TierdError: of another shape or dtype.
        """
        self._check(name)
        exactly(values, (self.elements,), self.dtype, f"state {name}")
        for part in self.step():
            part.states[name][:] = values[part.first : part.end]

    def _part(self, at: int, block: NDArray[np.uint8]) -> Part:
        size = self._rows.per_block
        first = at * size
        used = block[: size * self._rows.row_bytes].view(self.dtype)
        rows = used.reshape(len(self.names), size)[:, : self.elements - first]
        states = dict(zip(self.names, rows, strict=True))
        return Part(first=first, end=min(first + size, self.elements), states=states)

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise NotFound(f"no state {name!r}", hint=f"there are: {', '.join(self.names)}")
