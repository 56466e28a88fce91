# SPDX-License-Identifier: Apache-2.0
"""Donors' memory over TCP on loopback: copies, a sweep, blocks that are copied again, a donor.

Donors are processes of this machine, so that both ends share its CPUs: what is told is what tierd
adds, and not how fast a network is. Copies take turns with NIXL called directly, from the same
slots, and to and from memory that is registered already; ucx_perftest tells what UCX makes of them.
"""

import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import trustme
from numpy.typing import NDArray
from sweeps.donors import BY_TCP, HOST, DonorProcess, make_keys

from benches import _rdma_donor, _rdma_heal, _rdma_sweep
from benches._rdma_heal import HEALING_S
from benches.figure import Figure, NotHere
from tierd.errors import TierdError
from tierd.kernel.placed import place
from tierd.remote.link import STAGED_BYTES, Link
from tierd.remote.wire import Keys

LENT_MIB = 256
SIZES = (4 << 10, 1 << 20)
LEAST_OF_NIXL = 0.8
ROUNDS, BATCHES, SINGLES = 15, 8, 1000
PERFTEST_S = 60

Copy = Callable[[NDArray[np.int64]], None]


def run(*, only: Sequence[str] = (), seconds: int = HEALING_S) -> list[Figure]:
    """Measures all parts, or some; of copying again each round takes so many seconds."""
    os.environ.update(BY_TCP)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = make_keys(Path(folder), trustme.CA(), "bench")
        try:
            for part in only or PARTS:
                figures += PARTS[part](keys, seconds)
        except TierdError as error:
            raise NotHere(str(error)) from error
    return figures


def copies(keys: Keys, _: int) -> list[Figure]:
    donor = DonorProcess(keys, LENT_MIB)
    try:
        found = [figure for size in SIZES for figure in of_size(donor.address, keys, size)]
    finally:
        donor.end()
    return [*found, *of_perftest()]


def of_size(address: str, keys: Keys, block_bytes: int) -> Iterator[Figure]:
    """Batches each way, and what one block takes."""
    batch = STAGED_BYTES // block_bytes
    link = Link(address, keys, block_bytes, 4 * batch, deadline_s=30.0)
    data = place(batch * block_bytes).reshape(batch, block_bytes)
    link.adopt(data)  # as an arena's movers do with what they copy through
    size = f"{block_bytes >> 10} KiB"
    try:
        for way, call in (("read", link.read), ("write", link.write)):
            own, theirs = beside_nixl(link, way, call, data)
            name = f"{way}, {batch} blocks of {size}"
            shares = [nixl_s / own_s for own_s, nixl_s in zip(own, theirs, strict=True)]
            yield Figure.of_rounds(
                name, [data.nbytes / own_s / (1 << 20) for own_s in own], "MiB/s"
            )
            yield Figure.of_rounds(f"{name}: of NIXL's", shares, "", at_least=LEAST_OF_NIXL)
        one = data[:1]
        took = [seconds(lambda slots: link.read(slots, one), np.arange(1)) for _ in range(SINGLES)]
        yield Figure.of_rounds(f"read, one of {size}: p50", [np.median(took) * 1e6], "us")
        yield Figure.of_rounds(f"read, one of {size}: p99", [np.quantile(took, 0.99) * 1e6], "us")
    finally:
        link.end()


def beside_nixl(
    link: Link,
    way: str,
    call: Callable[[NDArray[np.int64], NDArray[np.uint8]], None],
    data: NDArray[np.uint8],
) -> tuple[list[float], list[float]]:
    """What a batch takes, and what it takes NIXL, in turn, of slots in random order."""
    random = np.random.default_rng(1)
    direct = directly(link, way, data)
    own, theirs = [], []
    for _ in range(ROUNDS):
        orders = [random.permutation(link.slots)[: len(data)] for _ in range(BATCHES)]
        own.append(sum(seconds(lambda slots: call(slots, data), each) for each in orders) / BATCHES)
        theirs.append(sum(seconds(direct, each) for each in orders) / BATCHES)
    return own, theirs


def directly(link: Link, way: str, data: NDArray[np.uint8]) -> Copy:
    """Returns what has NIXL copy between slots and memory of its own, and waits as it spins."""
    reached = link._reached
    agent = reached._agent
    agent.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM")
    rows = np.array([[data.ctypes.data, data.shape[1], 0, data.shape[1], len(data)]], np.uint64)
    here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM")
    numbers = np.arange(len(data), dtype=np.int32)

    def copy(slots: NDArray[np.int64]) -> None:
        handle = agent.make_prepped_xfer(
            way.upper(), here, numbers, reached._there, slots.astype(np.int32)
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        handle.release()
        assert state == "DONE"

    return copy


def of_perftest() -> Iterator[Figure]:
    """What UCX itself takes one way for each size, by the host's own ucx_perftest.

    Both ends spin in that. A read (ucp_get) by TCP is answered once a millisecond by its server,
    which waits for other things meanwhile (UCX 1.13), and so tells nothing.
    """
    for size in SIZES:
        with closing(socket.create_server((HOST, 0))) as free:
            port = str(free.getsockname()[1])
        test = ["-t", "ucp_put_lat", "-s", str(size), "-n", str(SINGLES)]
        words = ["ucx_perftest", "-p", port, *test]
        server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            said = _client([*words, HOST], server)
        finally:
            server.kill()
            server.wait()
        final = re.search(r"^Final:\s+\d+\s+([\d.]+)", said, re.MULTILINE)
        if final is None:
            raise NotHere(f"ucx_perftest tells nothing of {size} bytes: {said[-200:]}")
        name = f"ucx_perftest, one way, {size >> 10} KiB: p50"
        yield Figure.of_rounds(name, [float(final[1])], "us")


def _client(words: Sequence[str], server: subprocess.Popen[bytes]) -> str:
    """Runs it once its server listens."""
    until_s = time.monotonic() + PERFTEST_S
    while server.poll() is None and time.monotonic() < until_s:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PERFTEST_S)
        if not done.returncode:
            return done.stdout
        time.sleep(0.1)
    return ""


def seconds(call: Copy, slots: NDArray[np.int64]) -> float:
    begin_s = time.perf_counter()
    call(slots)
    return time.perf_counter() - begin_s


PARTS: Mapping[str, Callable[[Keys, int], list[Figure]]] = {
    "copies": copies,
    "sweep": _rdma_sweep.measure,
    "heal": _rdma_heal.measure,
    "donor": _rdma_donor.measure,
}
