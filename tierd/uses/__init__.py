# SPDX-License-Identifier: Apache-2.0
"""What programs have in arenas: embedding tables, KV caches, optimizer states, layers, experts."""

from tierd.uses.embedding import EmbeddingTable, Lookups, by_frequency
from tierd.uses.hot import KeepHot
from tierd.uses.kv_cache import KvCache, KvShape, KvStats

__all__ = [
    "EmbeddingTable",
    "KeepHot",
    "KvCache",
    "KvShape",
    "KvStats",
    "Lookups",
    "by_frequency",
]
