# SPDX-License-Identifier: Apache-2.0
"""A model's weights by layer, swept in order for each token, and fetched before they are used."""

from collections.abc import Iterator

from numpy.typing import DTypeLike

from tierd.arena import Arena, Foresight, Lookahead
from tierd.errors import NoRoom
from tierd.uses.matrices import Matrices, Parts


class Layers(Matrices):
    """Layers of equal weights, used in turn by one thread.

    Args:
        arena: has the blocks; the tier below the fastest one needs room for all layers but those
            in that, and for three more.
        count: of layers.
        shape: of a layer's weights, (rows, ...); of several matrices, flat: (numbers,).
        dtype: of them; bfloat16 goes as uint16.
        first_block: as of Matrices.
        look_ahead: have the next layers fetched while the program works on one.

    Raises:
        TierdError, NotFound: as Matrices.
        NoRoom: memory has no room for two layers.
    """

    def __init__(
        self,
        arena: Arena,
        count: int,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        first_block: int = 0,
        look_ahead: bool = True,
    ) -> None:
        super().__init__(arena, count, shape, dtype, first_block)
        if count > 1 and 2 * self.blocks_each > arena.shared.tiers[0].slots:
            raise NoRoom(
                f"two layers of {self.blocks_each} blocks, {arena.shared.tiers[0].slots} have room "
                "in the fastest tier",
                hint="make it larger: while one layer is used, the next one comes",
            )
        self._looks_ahead = look_ahead
        self._ahead: Lookahead | None = None

    @property
    def foresight(self) -> Foresight:
        """What came of looking ahead, in blocks."""
        return Foresight() if self._ahead is None else self._ahead.foresight

    def sweep(self) -> Iterator[tuple[int, Parts]]:
        """Yields each layer's number and its weights in place, which are held until the next one.

        Raises:
            NotFound: a layer was never written.
        """
        steps = [self.ids(number) for number in range(self.count)]
        if self._looks_ahead and self._ahead is None:
            self._ahead = Lookahead(self.arena, steps, repeats=True)
        acquire = self.arena.acquire if self._ahead is None else self._ahead.acquire
        for number, ids in enumerate(steps):
            with acquire(ids) as held:
                yield number, self.parts(held)
