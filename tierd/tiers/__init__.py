# SPDX-License-Identifier: Apache-2.0
"""Tiers: those made of NUMA nodes, the protocol of those that hold blocks, and plugins' fence."""

from tierd.tiers.plugin import (
    DeviceMemory,
    DeviceSpace,
    Facts,
    Health,
    ShrinkingSpace,
    Space,
    Tier,
    load,
)

__all__ = [
    "DeviceMemory",
    "DeviceSpace",
    "Facts",
    "Health",
    "ShrinkingSpace",
    "Space",
    "Tier",
    "load",
]
