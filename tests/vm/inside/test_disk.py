# SPDX-License-Identifier: Apache-2.0
"""Blocks on a block device, by this kernel's io_uring."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.errors import Conflict, TierdError
from tierd.kernel.uring import Uring
from tierd.tiers import Tier
from tierd.tiers.kit import TierContract
from tierd.tiers.nvme import DiskSpace, nvme

MIB = 1 << 20


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    file = tmp_path_factory.mktemp("disk") / "image"
    file.touch()
    os.truncate(file, 16 * MIB)
    subprocess.run(["modprobe", "loop"], check=True)
    command = ["losetup", "--find", "--show", str(file)]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield Path(path)
    finally:
        subprocess.run(["losetup", "--detach", path], check=True)


class TestOnADevice(TierContract):
    @pytest.fixture(autouse=True)
    def on(self, device: Path) -> None:
        self.device = device

    def make(self) -> Tier:
        return nvme(self.device, overwrite=True)

    def test_all_of_it_is_there_directly(self) -> None:
        tier = nvme(self.device, overwrite=True)
        assert tier.direct
        assert tier.facts.capacity_bytes == 16 * MIB
        with self.space() as space:
            assert isinstance(space, DiskSpace)
            assert isinstance(space.parts, Uring)


def test_a_device_is_not_overwritten_unasked(device: Path) -> None:
    with pytest.raises(TierdError, match="would be lost"):
        nvme(device)


def test_a_device_in_use_is_refused(device: Path) -> None:
    tier = nvme(device, overwrite=True)
    other = os.open(device, os.O_RDONLY | os.O_EXCL)  # as a mount has it
    try:
        with pytest.raises(Conflict, match="is in use"):
            tier.reserve(4096, 4)
    finally:
        os.close(other)
    tier.reserve(4096, 4).free()
