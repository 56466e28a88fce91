# SPDX-License-Identifier: Apache-2.0
"""Buffers and streams on the running kernel; numa_maps is the oracle."""

import errno
import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tierd.cli import control
from tierd.kernel._shim import ffi, lib  # noqa: TID251  # what no wrapper lets through
from tierd.kernel.speed import WINDOW_BYTES, Buffer
from tierd.model import NodeId

SLOT_BYTES = lib.TIERD_SLOT_BYTES
BUFFER_BYTES = 4 * WINDOW_BYTES
CPU = min(os.sched_getaffinity(0))
NODE = NodeId(int(Path("/sys/devices/system/node/has_memory").read_text().partition("-")[0]))


def cycle(buffer_bytes: int, seed: int = 1) -> tuple[int, list[int]]:
    """Links slots, and returns their number and in which order they follow each other."""
    words = np.zeros(buffer_bytes // 8, np.uint64)
    start = words.ctypes.data
    pointer = ffi.from_buffer("uint8_t[]", words.view("V8"), require_writable=True)
    slots = lib.tierd_link_slots(pointer, buffer_bytes, seed)
    order, at = [], start
    for _ in range(max(slots, 0)):
        order.append((at - start) // SLOT_BYTES)
        at = int(words[(at - start) // 8])
    assert slots < 0 or at == start
    return slots, order


@pytest.mark.parametrize("slots", [1, 2, 3, 1000])
def test_slots_are_one_cycle(slots: int) -> None:
    found, order = cycle(slots * SLOT_BYTES + 8)
    assert found == slots
    assert sorted(order) == list(range(slots))


def test_slots_go_from_window_to_window_and_within_one_at_random() -> None:
    size = 2 * WINDOW_BYTES + WINDOW_BYTES // 2
    slots, order = cycle(size)
    in_window = WINDOW_BYTES // SLOT_BYTES
    windows = np.array(order) // in_window
    assert sorted(order) == list(range(slots))
    assert (np.diff(windows) >= 0).all()
    assert (np.diff(order) == 1).mean() < 0.01
    assert cycle(size, seed=2)[1] != order


def test_no_slots_are_refused() -> None:
    assert cycle(SLOT_BYTES - 8)[0] == -errno.EINVAL
    assert cycle(SLOT_BYTES, seed=0)[0] == -errno.EINVAL


def mapping(address: int) -> str:
    maps = Path("/proc/self/numa_maps").read_text()
    return next(line for line in maps.splitlines() if line.startswith(f"{address:x} "))


def test_a_buffer_is_of_its_node_alone() -> None:
    with Buffer(NODE, BUFFER_BYTES + 4096) as buffer:
        assert buffer.size_bytes == BUFFER_BYTES
        line = mapping(buffer.address)
        assert f" bind:{NODE} " in line
        assert re.findall(r" N(\d+)=", line) == [str(NODE)]
        assert 0 <= buffer.huge_bytes() <= BUFFER_BYTES
        address = buffer.address
    assert f"\n{address:x} bind" not in Path("/proc/self/numa_maps").read_text()


@pytest.mark.parametrize("node", [-1, 1023, 1024])
def test_a_node_that_is_not_there_is_refused(node: int) -> None:
    with pytest.raises(OSError, match=f"memory of node {node}: Invalid argument"):
        Buffer(NodeId(node), BUFFER_BYTES)


def test_paces_are_of_the_time_that_was_asked_for() -> None:
    with Buffer(NODE, BUFFER_BYTES) as buffer:
        assert 0.1 < min(buffer.latency_ns(CPU, 0.05) for _ in range(3)) < 100_000
        assert buffer.read_mbps([CPU], 0.05) > 1
        assert buffer.write_mbps([CPU], 0.05) > 1


def test_what_is_written_replaces_the_slots() -> None:
    """So that a chase through it would leave the buffer; writes come last."""
    with Buffer(NODE, WINDOW_BYTES) as buffer:
        before = bytes(buffer.memory[:4096])
        buffer.read_mbps([CPU], 0.01)
        assert bytes(buffer.memory[:4096]) == before
        buffer.write_mbps([CPU], 0.05)
        assert bytes(buffer.memory[:4096]) != before


def test_others_run_while_it_measures() -> None:
    """The GIL is free, and the caller's own CPUs are as before."""
    ours, counted, done = os.sched_getaffinity(0), 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.wait(0.001):
            counted += 1

    counting = threading.Thread(target=count)
    counting.start()
    with Buffer(NODE, BUFFER_BYTES) as buffer:
        buffer.loaded_latency_ns(CPU, [], 0.3)
    done.set()
    counting.join()
    assert counted >= 5
    assert os.sched_getaffinity(0) == ours


def test_a_chase_goes_on_where_the_last_one_ended() -> None:
    """What was loaded already may be in the caches."""
    pace = ffi.new("struct tierd_pace *")
    words = np.zeros(5 * SLOT_BYTES, "V1")
    buffer = ffi.from_buffer("uint8_t[]", words, require_writable=True)
    assert lib.tierd_link_slots(buffer, len(words), 1) == 5
    _, order = cycle(len(words))
    for _ in range(3):
        first = order.index(pace.next // SLOT_BYTES)
        assert lib.tierd_follow_slots(buffer, pace.next, 0, 0, pace) == 0
        assert pace.next == order[(first + pace.count) % 5] * SLOT_BYTES
    with Buffer(NODE, 64 * WINDOW_BYTES) as chased:
        chased.latency_ns(CPU, 0.001)
        before = chased.next_slot
        chased.latency_ns(CPU, 0.001)
        assert chased.next_slot != before != 0


def test_parts_of_a_stream_are_whole_blocks() -> None:
    pace = ffi.new("struct tierd_pace *")
    words = np.zeros(lib.TIERD_BLOCK_BYTES, "V1")
    block = ffi.from_buffer("uint8_t[]", words, require_writable=True)
    assert lib.tierd_stream_reads(block, 0, 0, 0, pace) == -errno.EINVAL
    assert lib.tierd_stream_writes(block, 4096, 0, 0, pace) == -errno.EINVAL
    assert lib.tierd_stream_reads(block, lib.TIERD_BLOCK_BYTES, 0, 0, pace) == 0
    assert (pace.count, pace.ns > 0) == (lib.TIERD_BLOCK_BYTES, True)


def test_the_command_measures_this_machine() -> None:
    arguments = ["measure", f"{NODE}", "--json", "--loaded", "--seconds", "0.2"]
    done = CliRunner().invoke(control.main, arguments)
    assert done.exit_code == 0, done.output
    (node,) = json.loads(done.output)["nodes"]
    assert node["id"] == NODE
    assert node["read_latency_ns"] > 0
    assert node["write_bandwidth_mbps"] > 0
    assert (node["loaded_latency_ns"] is None) == (len(node["cpus"]) == 1)
