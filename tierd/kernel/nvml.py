# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's management library tells of a card, without a context on it.

Where the library or its bindings are missing nothing is known, and that is no error: CUDA's own
driver tells the rest.
"""

from functools import cache
from typing import Any


@cache
def _library() -> Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def free_bytes(pci: str) -> int | None:
    """What is free of a card's memory, None where it is not known."""
    nvml = _library()
    if nvml is None:
        return None
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, pci)).free)
    except nvml.NVMLError:
        return None


def is_lost(pci: str) -> bool:
    """Whether the card is known to have fallen off its bus, or to need a reset."""
    nvml = _library()
    if nvml is None:
        return False
    try:
        nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, pci))
    except nvml.NVMLError as error:
        return error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
    return False


def _handle(nvml: Any, pci: str) -> Any:
    return nvml.nvmlDeviceGetHandleByPciBusId(pci.encode())
