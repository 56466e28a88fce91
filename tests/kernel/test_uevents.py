# SPDX-License-Identifier: Apache-2.0
"""Uevents of the running kernel, which sends one when "change" is written to a uevent file."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tierd.kernel.uevents import Uevents

NODE = Path("/sys/devices/system/node/node0/uevent")
CPU = Path("/sys/devices/system/cpu/cpu0/uevent")


def send(path: Path = NODE) -> None:
    """Has an event sent, which waits at its listeners before write(2) returns."""
    path.write_text("change")


@pytest.fixture
def uevents() -> Iterator[Uevents]:
    if not os.access(NODE, os.W_OK):
        pytest.skip(f"{NODE} cannot be written here")
    before = psutil.Process().num_fds()
    opened = Uevents()
    with opened:
        yield opened
    del opened
    assert psutil.Process().num_fds() == before


def test_a_change_is_told_once(uevents: Uevents) -> None:
    assert not uevents.read()
    send()
    assert uevents.read()
    assert not uevents.read()
    send()
    assert uevents.read()


def test_other_subsystems_are_not_told(uevents: Uevents) -> None:
    send(CPU)
    assert not uevents.read()
    send()
    assert uevents.read()


def test_a_burst_is_told_once(uevents: Uevents) -> None:
    for _ in range(50):
        send()
    assert uevents.read()
    assert not uevents.read()


def test_an_overrun_is_told_and_recovered_from(uevents: Uevents) -> None:
    uevents._monitor.set_receive_buffer_size(4096)  # libudev's own is 128 MiB
    for _ in range(50):
        send()
    with pytest.raises(OSError, match="Error while polling"):
        uevents._monitor.poll(0)
    assert uevents.read()
    assert not uevents.read()
    send()
    assert uevents.read()


def test_nothing_waiting_costs_next_to_nothing(uevents: Uevents) -> None:
    begin_s = time.process_time()
    for _ in range(100):
        uevents.read()
    assert (time.process_time() - begin_s) / 100 < 0.001
