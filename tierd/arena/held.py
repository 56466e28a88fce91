# SPDX-License-Identifier: Apache-2.0
"""Blocks that a program holds: views of those that the CPU reaches, addresses of the others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tierd.errors import TierdError
from tierd.kernel.arena import MEMORY, Blocks, Bytes, Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where blocks are held: on a tier of this number or in any MEMORY, at most `room` of them.

    `device` is the number of the device that alone reaches them.
    """

    room: int
    on: int = MEMORY
    tier: str = "memory"
    device: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBlock:
    """A held block for CUDA: what PyTorch, CuPy and Numba make an array of without a copy.

    It must not be used after release(), and is complete: no stream has to be waited for.
    """

    address: int
    size_bytes: int
    device: int
    write: bool

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, not self.write),
            "version": 3,
            "strides": None,
            "stream": None,
        }


class Held:
    """Blocks that stay where they are until release(); a context.

    `addresses` are where each begins, of the CPU, or of the device that they are held on. `held[i]`
    is the i-th block in place, for NumPy and by DLPack for all else, `held.on_device(i)` one on a
    device. Neither must be used after release(), as another block may be there: what a device was
    told to do with it has to be done by then.
    """

    def __init__(
        self,
        blocks: Blocks,
        ids: Ids,
        addresses: NDArray[np.uint64],
        memories: Sequence[Bytes],
        place: Place,
        *,
        write: bool,
    ) -> None:
        self.ids = ids
        self.addresses = addresses
        self.write = write
        self._blocks: Blocks | None = blocks
        self._memories = memories
        self._place = place

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Bytes]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, number: int) -> Bytes:
        address = self._address(number)
        if self._place.device is not None:
            raise TierdError(
                f"block {self.ids[number]} is on {self._place.tier}, which the CPU does not reach",
                hint="use held.on_device(i) or held.addresses there, or acquire() it without `on`",
            )
        for memory in self._memories:
            offset = address - memory.ctypes.data
            if 0 <= offset < memory.nbytes:
                view: Bytes = memory[offset // memory.shape[1]]
                view.flags.writeable = self.write
                return view
        raise AssertionError("an address outside of all memory")

    def by_memory(self) -> Iterator[tuple[Bytes, Ids, Ids]]:
        """Tells where the blocks are in bulk, for who gathers from many of them.

        Yields:
            Of each tier's memory that has some: the memory, (slots, block bytes), the numbers of
            the blocks in `ids`, and the slot of each. Not to be used after release().
        """
        if self._blocks is None:
            raise TierdError(f"block {self.ids[:1]} is not held any more")
        told = 0
        for memory in self._memories:
            begin = memory.ctypes.data
            found = np.flatnonzero(
                (self.addresses >= begin) & (self.addresses < begin + memory.nbytes)
            )
            if len(found):
                slots = (self.addresses[found] - np.uint64(begin)).astype(np.int64)
                shown = memory[:]
                shown.flags.writeable = self.write
                told += len(found)
                yield shown, found, slots // memory.shape[1]
        if told < len(self):
            raise AssertionError("an address outside of all memory")

    def on_device(self, number: int) -> DeviceBlock:
        """Returns the block at a place of `ids`.

        Raises:
            TierdError: it is not on a device, or was released.
        """
        address = self._address(number)
        if self._place.device is None:
            raise TierdError(
                f"block {self.ids[number]} is in {self._place.tier}, and on no device",
                hint="acquire() it on a tier of a device: on='hbm'",
            )
        return DeviceBlock(
            address=address,
            size_bytes=self._memories[0].shape[1],
            device=self._place.device,
            write=self.write,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets go.

        Raises:
            TierdError: it was released before.
        """
        blocks, self._blocks = self._blocks, None
        if blocks is None:
            raise TierdError(
                f"{len(self)} blocks were released twice, the first of them {self.ids[:1]}"
            )
        blocks.unpin(self.ids, write=self.write)

    def _address(self, number: int) -> int:
        if self._blocks is None:
            raise TierdError(f"block {self.ids[number]} is not held any more")
        return int(self.addresses[number])
