# SPDX-License-Identifier: Apache-2.0
"""Memory of NVIDIA's cards at addresses that stay, and copies to and from it: CUDA's driver.

By its virtual memory calls ("Virtual Memory Management" of the CUDA Driver API): a range of
addresses is reserved, and backed by one handle for each granule. Nothing is managed memory: a card
whose managed memory is oversubscribed can hang. The driver's library is loaded by the first call,
so that this module can be imported without.
"""

import re
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.errors import NoRoom, NotFound, TierdError

_TEXT_BYTES = 256
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_REGISTER_PORTABLE = 1

_AT_ONCE_S = 2e-3
"""So long an event is asked again at once: a sleep would take longer than the copy."""

_SHORTEST_S, _LONGEST_S = 50e-6, 10e-3

_LOST = frozenset(
    {
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "CUDA_ERROR_NO_DEVICE",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "CUDA_ERROR_UNKNOWN",
    }
)
"""After any of these the process gets nothing more from the card."""


class CudaError(TierdError):
    """A call of CUDA's driver that failed; `name` is the driver's, such as CUDA_ERROR_UNKNOWN."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(
            f"{call}: {name}",
            hint="`dmesg | grep -i nvrm` tells what the card's driver saw",
        )
        self.name = name

    @property
    def is_lost(self) -> bool:
        """Whether the card, or all that this process has on it, is gone."""
        return self.name in _LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card, by CUDA's number. `pci` is its address, such as 0000:65:00.0."""

    number: int
    name: str
    uuid: str
    pci: str


@cache
def _driver() -> Any:
    """Returns the driver's calls, initialized.

    Raises:
        TierdError: there are no bindings, or no driver.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TierdError(
            f"CUDA's bindings are missing: {error}", hint="pip install 'tierd[gpu]'"
        ) from error
    try:
        (result,) = driver.cuInit(0)
    except Exception as error:  # the bindings have several classes for a library that isn't there
        raise TierdError(
            f"CUDA's driver cannot be loaded: {str(error).splitlines()[0].rstrip('.')}",
            hint="install NVIDIA's driver for the card: `nvidia-smi` works then",
        ) from error
    if result.name == "CUDA_ERROR_NO_DEVICE":
        raise NotFound("CUDA's driver finds no card", hint="`nvidia-smi -L` lists what there is")
    if result.value:
        raise CudaError("cuInit", result.name)
    return driver


def _call(name: str, *arguments: Any) -> Any:
    """Calls the driver; returns what it gives: nothing, one value, or a tuple."""
    result, *values = getattr(_driver(), name)(*arguments)
    if result.value:
        raise CudaError(name, result.name)
    return values[0] if len(values) == 1 else tuple(values)


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def cards() -> list[Card]:
    """Lists the cards that this process may use (CUDA_VISIBLE_DEVICES).

    Raises:
        TierdError: there are no bindings, or no driver.
        NotFound: the driver finds no card.
    """
    return [_card(number) for number in range(_call("cuDeviceGetCount"))]


def _card(number: int) -> Card:
    device = _call("cuDeviceGet", number)
    digits = bytes(_call("cuDeviceGetUuid", device).bytes).hex()
    groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return Card(
        number=number,
        name=_text(_call("cuDeviceGetName", _TEXT_BYTES, device)),
        uuid=f"GPU-{'-'.join(groups)}",
        pci=_text(_call("cuDeviceGetPCIBusId", _TEXT_BYTES, device)).lower(),
    )


def find(device: int | str) -> Card:
    """Finds a card by its number, its UUID (GPU-...), or its PCI address ([domain:]bus:slot.0).

    Raises:
        NotFound: there is none.
        TierdError: as cards().
    """
    found = cards()
    for card in found:
        if device in (card.number, card.uuid) or _is_pci(str(device), card.pci):
            return card
    listed = ", ".join(f"{card.number} ({card.name}, {card.uuid}, {card.pci})" for card in found)
    raise NotFound(f"there is no card {device!r}", hint=f"there are: {listed or 'none'}")


def _is_pci(text: str, pci: str) -> bool:
    parts = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", text.lower())
    domain, _, rest = pci.partition(":")
    return parts is not None and parts[2] == rest and int(parts[1] or "0", 16) == int(domain, 16)


class Context:
    """A card's primary context, the one that PyTorch and CUDA's runtime use, for any thread.

    Each call makes it the thread's own first, and leaves it so.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._device = _call("cuDeviceGet", number)
        self._context = _call("cuDevicePrimaryCtxRetain", self._device)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the driver in this context.

        Raises:
            CudaError: it failed.
        """
        _call("cuCtxSetCurrent", self._context)
        return _call(name, *arguments)

    def free_bytes(self) -> int:
        """What is free of the card's memory."""
        free, _ = self.call("cuMemGetInfo")
        return int(free)

    def granule_bytes(self) -> int:
        """What memory is mapped in."""
        driver = _driver()
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self.kind(), minimum))

    def kind(self) -> Any:
        """Memory of the card itself."""
        driver = _driver()
        kind = driver.CUmemAllocationProp()
        kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = self.number
        return kind

    def synchronize(self) -> None:
        """Waits until the card has done all that was asked of it in this context."""
        self.call("cuCtxSynchronize")

    def close(self) -> None:
        _call("cuDevicePrimaryCtxRelease", self._device)


class Range:
    """Memory of a card at addresses that stay until free(): a handle for each granule.

    Args:
        context: of the card.
        size_bytes: what is wanted. Where the card has less, `size_bytes` tells what is there.

    Raises:
        NoRoom: the card has not a single granule left.
        CudaError: something else failed. Nothing is left behind.
    """

    def __init__(self, context: Context, size_bytes: int) -> None:
        self._context = context
        self._granule = context.granule_bytes()
        wanted = -(-size_bytes // self._granule)
        self._reserved_bytes = wanted * self._granule
        self.address = int(context.call("cuMemAddressReserve", self._reserved_bytes, 0, 0, 0))
        self._handles: list[Any] = []
        try:
            self._map(wanted)
        except BaseException:
            self.free()
            raise
        self.size_bytes = min(size_bytes, len(self._handles) * self._granule)

    def _map(self, wanted: int) -> None:
        driver, kind = _driver(), self._context.kind()
        for number in range(wanted):
            try:
                handle = self._context.call("cuMemCreate", self._granule, kind, 0)
            except CudaError as error:
                if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
                    break
                raise
            at = self.address + number * self._granule
            try:
                self._context.call("cuMemMap", at, self._granule, 0, handle, 0)
            except CudaError:
                self._context.call("cuMemRelease", handle)
                raise
            self._handles.append(handle)
        if not self._handles:
            raise NoRoom(
                f"card {self._context.number} has no memory left",
                hint="`nvidia-smi` tells who has it; or give a smaller capacity_bytes",
            )
        access = driver.CUmemAccessDesc()
        access.location = kind.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        mapped_bytes = len(self._handles) * self._granule
        self._context.call("cuMemSetAccess", self.address, mapped_bytes, [access], 1)

    def free(self) -> None:
        """Gives it all back, when nobody on the card uses it any more.

        Raises:
            CudaError: the driver did not take it back; the first such error.
        """
        errors: list[CudaError] = []
        calls: list[tuple[str, *tuple[Any, ...]]] = []
        for number, handle in enumerate(self._handles):
            at = self.address + number * self._granule
            calls += [("cuMemUnmap", at, self._granule), ("cuMemRelease", handle)]
        calls.append(("cuMemAddressFree", self.address, self._reserved_bytes))
        self._handles = []
        for name, *arguments in calls:
            try:
                self._context.call(name, *arguments)
            except CudaError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class Stream:
    """Copies between a card and memory, in their order, beside all else that the card does."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._event = context.call("cuEventCreate", _EVENT_DISABLE_TIMING)
        try:
            self._stream = context.call("cuStreamCreate", _STREAM_NON_BLOCKING)
        except CudaError:
            context.call("cuEventDestroy", self._event)
            raise

    def copy_in(self, address: int, host: int, size_bytes: int) -> None:
        """Begins a copy from memory to the card."""
        self._context.call("cuMemcpyHtoDAsync", address, host, size_bytes, self._stream)

    def copy_out(self, host: int, address: int, size_bytes: int) -> None:
        """Begins a copy from the card to memory."""
        self._context.call("cuMemcpyDtoHAsync", host, address, size_bytes, self._stream)

    def copy_within(self, to: int, address: int, size_bytes: int) -> None:
        """Begins a copy from the card to itself."""
        self._context.call("cuMemcpyDtoDAsync", to, address, size_bytes, self._stream)

    def record(self) -> None:
        """Marks what was begun up to now, for is_done()."""
        self._context.call("cuEventRecord", self._event, self._stream)

    def is_done(self) -> bool:
        """Whether all has ended that was begun before record().

        Raises:
            CudaError: it will not, or any other work on the card has failed.
        """
        try:
            self._context.call("cuEventQuery", self._event)
        except CudaError as error:
            if error.name == "CUDA_ERROR_NOT_READY":
                return False
            raise
        return True

    def wait(self) -> None:
        """Waits until all that was begun has ended, however long: memory is in use until then."""
        self.record()
        begin_s, pause_s = time.monotonic(), _SHORTEST_S
        while not self.is_done():
            if time.monotonic() - begin_s > _AT_ONCE_S:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)

    def close(self) -> None:
        self._context.call("cuEventDestroy", self._event)
        self._context.call("cuStreamDestroy", self._stream)


def pin(context: Context, memory: NDArray[np.uint8]) -> None:
    """Locks memory, so that the card copies from and to it by itself; it must stay until unpin().

    Raises:
        CudaError: it can't be, or is already.
    """
    context.call("cuMemHostRegister", memory.ctypes.data, memory.nbytes, _REGISTER_PORTABLE)


def unpin(context: Context, memory: NDArray[np.uint8]) -> None:
    context.call("cuMemHostUnregister", memory.ctypes.data)
