# SPDX-License-Identifier: Apache-2.0
"""The names that both ends know."""

CONTROL = "tierd.sock"
"""Everything; for root and GROUP."""

MONITOR = "monitor.sock"
"""What neither changes anything nor tells of one process's memory; for all."""

ARENAS = "arena.sock"
"""Arenas of programs; for root and GROUP."""

GROUP = "tierd"

DONOR = "tierd-donor"
"""The daemon that lends memory: its own CONTROL and MONITOR are in /run/tierd-donor."""
