# SPDX-License-Identifier: Apache-2.0
"""Arenas: a program's own blocks in tiers, placed by hand, by need, or by a daemon."""

from tierd.arena.arena import Arena
from tierd.arena.held import DeviceBlock, Held
from tierd.arena.lookahead import Foresight, Lookahead
from tierd.arena.steered import Steered

__all__ = ["Arena", "DeviceBlock", "Foresight", "Held", "Lookahead", "Steered"]
