# SPDX-License-Identifier: Apache-2.0
"""Real donors, each a process, and a borrower that has their memory by RDMA."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import trustme
from sweeps.donors import DonorProcess, make_keys

from tierd.arena import Arena
from tierd.errors import TierFailed
from tierd.remote.link import Link
from tierd.remote.wire import Keys
from tierd.tiers.memory import dram
from tierd.tiers.rdma import rdma

LENT_MIB, BLOCK, BLOCKS, FAST = 4, 128 << 10, 12, 4
FAR = (BLOCKS - FAST) * BLOCK
DEADLINE_S = 5.0
TRIES = 5


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"), trustme.CA(), "host")


@pytest.fixture(scope="module")
def donors(keys: Keys) -> Iterator[list[DonorProcess]]:
    with ThreadPoolExecutor() as both:
        found = list(both.map(lambda _: DonorProcess(keys, LENT_MIB, by={}), range(2)))
        try:
            list(both.map(lambda donor: lease_once(donor, keys), found))
            yield found
        finally:
            for donor in found:
                donor.end()


def lease_once(donor: DonorProcess, keys: Keys) -> None:
    """Has it load UCX, which takes an emulated CPU longer than a borrower waits for an answer."""
    for left in reversed(range(TRIES)):
        try:
            Link(donor.address, keys, BLOCK, 1, DEADLINE_S).end()
            return
        except TierFailed:
            if not left:
                raise


def test_a_donor_that_is_stopped_is_read(
    donors: list[DonorProcess], keys: Keys, carried: Callable[[], int]
) -> None:
    slots = np.arange(8)
    data = np.random.default_rng(1).integers(0, 256, (8, BLOCK), dtype=np.uint8)
    found = np.zeros_like(data)
    link = Link(donors[0].address, keys, BLOCK, 8, DEADLINE_S)
    try:
        link.write(slots, data)
        donors[0].send(signal.SIGSTOP)
        link.read(slots, found)
        assert link.failure is None
    finally:
        donors[0].send(signal.SIGCONT)
        link.end()
    assert (found == data).all()
    assert carried() >= 2 * data.nbytes


def test_a_donor_that_stops_and_dies_costs_no_byte(
    donors: list[DonorProcess], keys: Keys, carried: Callable[[], int]
) -> None:
    ids = np.arange(BLOCKS)
    data = np.random.default_rng(2).integers(0, 256, (BLOCKS, BLOCK), dtype=np.uint8)
    addresses = [donor.address for donor in donors]
    tier = rdma(
        addresses,
        BLOCKS * BLOCK,
        ca=keys.ca,
        cert=keys.cert,
        key=keys.key,
        deadline_s=DEADLINE_S,
    )
    with Arena(BLOCK, [dram(FAST * BLOCK), tier], blocks=BLOCKS) as arena:
        [space] = tier.spaces
        arena.write(ids, data)
        assert carried() >= 2 * FAR  # on both
        assert (arena.read(ids) == data).all()
        assert carried() >= 3 * FAR
        donors[0].send(signal.SIGSTOP)
        assert (arena.read(ids) == data).all()
        donors[0].send(signal.SIGKILL)
        assert (arena.read(ids) == data).all()
        assert list(space.failures) == addresses[:1]
        assert (space.copies.lost, space.copies.disbelieved) == (0, 0)
        assert arena.fenced == {}


def test_a_donor_that_is_told_to_end_ends_well(donors: list[DonorProcess]) -> None:
    donors[1].send(signal.SIGTERM)
    assert donors[1].process.wait(30) == 0
