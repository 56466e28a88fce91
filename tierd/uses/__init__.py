# SPDX-License-Identifier: Apache-2.0
"""What programs have in arenas, each with a policy of its own: docs/uses.md."""

from tierd.uses.embedding import EmbeddingTable, Lookups, by_frequency
from tierd.uses.experts import Experts, Selected, Selections
from tierd.uses.hot import KeepHot
from tierd.uses.kv_cache import KvCache, KvShape, KvStats
from tierd.uses.layers import Layers
from tierd.uses.matrices import Matrices
from tierd.uses.optimizer import OptimizerStates, Part

__all__ = [
    "EmbeddingTable",
    "Experts",
    "KeepHot",
    "KvCache",
    "KvShape",
    "KvStats",
    "Layers",
    "Lookups",
    "Matrices",
    "OptimizerStates",
    "Part",
    "Selected",
    "Selections",
    "by_frequency",
]
