# SPDX-License-Identifier: Apache-2.0
"""What programs have in arenas: embedding tables, KV caches, optimizer states, layers, experts."""

from tierd.uses.embedding import EmbeddingTable, Lookups, by_frequency
from tierd.uses.hot import KeepHot

__all__ = ["EmbeddingTable", "KeepHot", "Lookups", "by_frequency"]
