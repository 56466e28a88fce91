# SPDX-License-Identifier: Apache-2.0
"""The card that these tests run on: a real one, or a fake libcuda.so.1 that was loaded instead.

tests/unit/test_hbm.py starts them for each, in a process of its own. What only a fake can be told
to do, the fixture `fake` tells it; tests that use it are left out on a real card.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tierd.kernel import cuda

FAKE = "FAKE_CUDA_CONTROL" in os.environ

CONTROL = np.dtype(
    [(name, "<u4") for name in ("cards", "hold", "error", "deny", "pinned", "copies")]
)
"""struct control of fake_cuda.c."""


def pytest_report_header() -> list[str]:
    return [f"card: {card.name}, {card.uuid}, {card.pci}" for card in cuda.cards()]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """It is asked about all tests, also those of other folders, which have fakes of their own."""
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    left_out = [item for item in ours if not FAKE and "fake" in getattr(item, "fixturenames", ())]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


class Fake:
    """What the fake is told, and tells."""

    def __init__(self, control: NDArray[np.void]) -> None:
        self._control = control

    def __getitem__(self, name: str) -> int:
        return int(self._control[name][0])

    def __setitem__(self, name: str, value: int) -> None:
        self._control[name] = value


@pytest.fixture
def fake() -> Iterator[Fake]:
    fake = Fake(np.memmap(os.environ["FAKE_CUDA_CONTROL"], CONTROL, "r+", shape=(1,)))
    yield fake
    for name in ("hold", "error", "deny"):
        fake[name] = 0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """All of the card's memory is given back, but for what the driver keeps for itself."""
    context = cuda.Context(0)
    before = context.free_bytes()
    yield
    after = context.free_bytes()
    context.close()
    assert before - after < (1 if FAKE else 64 << 20)
