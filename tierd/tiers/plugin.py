# SPDX-License-Identifier: Apache-2.0
"""What a tier of blocks is, and how plugins that make one are found: docs/plugins.md.

A plugin is a function that returns a Tier, named in the entry points of group `tierd.tiers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.errors import NotFound, TierdError
from tierd.model import TierKind

GROUP = "tierd.tiers"


class Health(StrEnum):
    GOOD = "good"
    FULL = "full"
    """What is there can be read, and nothing is to be added."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a tier says of itself. A block is a multiple of `granule_bytes`."""

    name: str
    kind: TierKind
    capacity_bytes: int
    granule_bytes: int = 64
    latency_ns: int | None = None
    bandwidth_mbps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Slots one after the other from an address that a device reaches, and the CPU does not.

    `number` is that of the device, for CUDA.
    """

    address: int
    number: int


class Space(Protocol):
    """The slots of one arena on a tier, from 0 to `slots` - 1, each as large as a block.

    No two of its calls are made at the same time. Arrays that it is given are its own only until
    it returns.
    """

    @property
    def slots(self) -> int:
        """How many there are: what was asked for, or fewer."""
        ...

    @property
    def memory(self) -> NDArray[np.uint8] | None:
        """The slots themselves, shape (slots, block bytes), contiguous; None without addresses.

        Where it is given, blocks are used in place, and copied without asking.
        """
        ...

    def store(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> int:
        """Copies `data`, shape (len(slots), block bytes), into slots; returns how many."""
        ...

    def load(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> int:
        """Copies slots that were stored into `into`, shaped as of store(); returns how many."""
        ...

    def free(self) -> None:
        """Gives everything back. Nothing is called after it."""
        ...


class DeviceSpace(Space, Protocol):
    """A space whose slots a device reaches: blocks can be held there, too. `memory` is None."""

    @property
    def device(self) -> DeviceMemory: ...

    def adopt(self, buffer: NDArray[np.uint8]) -> None:
        """Is told of memory before store() and load() get parts of it, to pin it for copies.

        It is to be kept until free(), or at least not to be used after it is gone. What cannot be
        pinned is copied all the same.
        """
        ...


class ShrinkingSpace(Space, Protocol):
    """A space whose free slots need no memory, so that others have it until they are used."""

    def can_give_back(self) -> bool:
        """Whether blocks of this size can be given back one by one."""
        ...

    def give_back(self, slots: NDArray[np.int64]) -> None:
        """Frees what slots without blocks take; it is there again when they are used."""
        ...


class Tier(Protocol):
    """Where blocks can be."""

    @property
    def facts(self) -> Facts: ...

    def health(self) -> Health: ...

    def reserve(self, block_bytes: int, slots: int) -> Space:
        """Takes room for so many blocks, so that none is missing later."""
        ...


class Plugin(Protocol):
    """What an entry point names."""

    def __call__(self, **options: object) -> Tier: ...


def load(name: str, options: Mapping[str, object]) -> Tier:
    """Makes a tier by the name of its plugin.

    Raises:
        NotFound: there is no such plugin.
        TierdError: it could not be imported, or made no tier of these options.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        names = ", ".join(sorted(found))
        raise NotFound(f"no plugin for a tier {name!r}", hint=f"there are: {names}")
    try:
        plugin: Plugin = found[name].load()
        return plugin(**options)
    except Exception as error:  # it is anybody's code
        raise TierdError(
            f"plugin {name!r} ({found[name].value}): {type(error).__name__}: {error}",
            hint="docs/plugins.md tells what a plugin has to do",
        ) from error
