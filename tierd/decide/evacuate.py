# SPDX-License-Identifier: Apache-2.0
"""In which order the memory of a node that is being emptied goes."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tierd.decide.heat import score
from tierd.model import Pid, Rank


def hottest_first(
    pieces: Mapping[Pid, NDArray[np.void]], rank: Rank
) -> list[tuple[Pid, NDArray[np.void]]]:
    """Returns what of some targets is hot and on a tier, the hottest first.

    Args:
        pieces: of each target (dtype PIECE), by rising address.
        rank: the tier's.

    Returns:
        Targets with ranges of theirs (fields start and end, by rising address), each about as hot:
        within a power of two, since each turn costs. What is cold or unknown is left out.
    """
    turns: list[tuple[int, Pid, NDArray[np.void]]] = []
    for pid, known in pieces.items():
        there = known[(known["resident"][:, rank] > 0) & (score(known) > 0)]
        bands = np.frexp(score(there))[1]
        for band in np.unique(bands).tolist():
            turns.append((-band, pid, there[["start", "end"]][bands == band]))
    return [(pid, ranges) for _, pid, ranges in sorted(turns, key=lambda turn: turn[:2])]
