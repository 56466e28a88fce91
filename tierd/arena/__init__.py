# SPDX-License-Identifier: Apache-2.0
"""Arenas: a program's own blocks in tiers, placed by hand or by need."""

from tierd.arena.arena import Arena
from tierd.arena.held import DeviceBlock, Held
from tierd.arena.lookahead import Foresight, Lookahead

__all__ = ["Arena", "DeviceBlock", "Foresight", "Held", "Lookahead"]
