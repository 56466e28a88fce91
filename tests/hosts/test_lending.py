# SPDX-License-Identifier: Apache-2.0
"""tierctl donor with real donors, and an arena that has their memory by NIXL over TCP."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from click.testing import CliRunner
from sweeps.donors import BY_TCP, HOST, DonorProcess, make_keys

from tests.unit.test_leases import until
from tierd.arena import Arena
from tierd.cli.control import main
from tierd.remote.wire import Keys
from tierd.tiers.memory import dram
from tierd.tiers.rdma import rdma

LENT_MIB, BLOCK, BLOCKS = 4, 4096, 100


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path, trustme.CA(), "host")


@pytest.fixture
def donors(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DonorProcess]]:
    for name, value in BY_TCP.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        found = []
        for _ in range(3):
            found.append(DonorProcess(keys, LENT_MIB))
            stack.callback(found[-1].end)
        yield found


def tierctl(donor: DonorProcess, *words: str) -> Any:
    where = ["--runtime-dir", str(donor.runtime_dir)]
    done = CliRunner().invoke(main, ["donor", *words, *where, "--json"], prog_name="tierctl")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_a_drained_donor_is_left_without_loss_and_used_again(
    donors: list[DonorProcess], keys: Keys
) -> None:
    ids = np.arange(BLOCKS)
    data = np.random.default_rng(1).integers(0, 256, (BLOCKS, BLOCK), dtype=np.uint8)
    addresses = [donor.address for donor in donors]
    tier = rdma(addresses, 128 * BLOCK, ca=keys.ca, cert=keys.cert, key=keys.key)
    with Arena(BLOCK, [dram(16 * BLOCK), tier], blocks=BLOCKS) as arena:
        [space] = tier.spaces
        arena.write(ids, data)
        [borrower] = tierctl(donors[0], "status")["borrowers"]
        assert (borrower["name"], borrower["address"]) == ("host", HOST)
        assert borrower["bytes"] >= 50 * BLOCK

        drained = tierctl(donors[0], "drain")
        assert (drained["borrowers"], drained["leaves"], drained["borrowed"]) == ([], True, 0)
        assert space.copies.thin == 0
        assert (arena.read(ids) == data).all()

        assert tierctl(donors[0], "drain", "--undo")["leaves"] is False
        until(lambda: bool(tierctl(donors[0], "status")["borrowers"]))
        assert (arena.read(ids) == data).all()
        assert arena.fenced == {}
    until(lambda: all(tierctl(donor, "status")["borrowed"] == 0 for donor in donors))


def test_systemd_is_told_when_it_lends_and_how_long_its_end_may_take(
    keys: Keys, tmp_path: Path
) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.settimeout(30)
        donor = DonorProcess(keys, LENT_MIB, by={**BY_TCP, "NOTIFY_SOCKET": str(path)})
        try:
            assert systemd.recv(64) == b"READY=1"
            donor.send(signal.SIGTERM)
            assert systemd.recv(64) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=90000000"
        finally:
            donor.end()
