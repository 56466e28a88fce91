# SPDX-License-Identifier: Apache-2.0
"""Three donors and two borrowers, each a host, and links that are cut and restored."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from sweeps.donors import DonorProcess, make_keys

from tests.hosts.network import Host, network
from tierd.remote.wire import Keys

PROGRAM = Path(__file__).parent / "borrower.py"
BY_ETH = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
LENT_MIB = 32
WAIT_S, LOOK_S = 60.0, 0.2
"""A donor that was lost is looked for ever more rarely."""

DONORS, BORROWERS = ("donor-a", "donor-b", "donor-c"), ("borrower-a", "borrower-b")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.thorough,
]


class Borrower:
    """borrower.py on a host."""

    def __init__(self, host: Host, keys: Keys, donors: list[str]) -> None:
        self.host = host
        files = [str(keys.ca), str(keys.cert), str(keys.key)]
        self._process = subprocess.Popen(
            [*host.prefix, sys.executable, str(PROGRAM), *files, *donors],
            env={**os.environ, **BY_ETH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        while (answer := self._process.stdout.readline()) and not answer.startswith(("{", '"')):
            pass  # UCX's own words
        return json.loads(answer)

    def is_whole(self, donors_lost: int) -> bool:
        told = self.ask("status")
        return not told["thin"] and not told["lost"] and len(told["failures"]) == donors_lost

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class World:
    hosts: list[Host]
    """The donors'."""
    borrowers: list[Borrower]

    def each_is_right(self) -> None:
        assert [borrower.ask("read") for borrower in self.borrowers] == ["right", "right"]

    def until_whole(self, donors_lost: int) -> None:
        until_s = time.monotonic() + WAIT_S
        while not all(borrower.is_whole(donors_lost) for borrower in self.borrowers):
            assert time.monotonic() < until_s, "it did not come to that"
            time.sleep(LOOK_S)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    ca = trustme.CA()
    with network([*DONORS, *BORROWERS]) as hosts, ExitStack() as stack:
        lending, borrowing = hosts[: len(DONORS)], hosts[len(DONORS) :]
        addresses = []
        for host, name in zip(lending, DONORS, strict=True):
            keys = make_keys(tmp_path, ca, name, host.address)
            donor = DonorProcess(keys, LENT_MIB, host=host.address, prefix=host.prefix, by=BY_ETH)
            stack.callback(donor.end)
            addresses.append(donor.address)
        borrowers = []
        for host, name in zip(borrowing, BORROWERS, strict=True):
            borrowers.append(Borrower(host, make_keys(tmp_path, ca, name), addresses))
            stack.callback(borrowers[-1].end)
        for seed, borrower in enumerate(borrowers):
            assert borrower.ask(f"write {seed}") == "written"
        yield World(lending, borrowers)


def test_a_link_that_is_cut_and_restored_costs_no_byte(world: World) -> None:
    world.each_is_right()
    world.hosts[0].cut()
    world.each_is_right()
    world.until_whole(donors_lost=1)
    world.hosts[0].restore()
    world.until_whole(donors_lost=0)
    world.hosts[1].cut()
    world.each_is_right()


def test_who_is_cut_off_from_all_donors_finds_everything_again(world: World) -> None:
    cut = world.borrowers[0]
    cut.host.cut()
    until_s = time.monotonic() + WAIT_S
    while not (told := cut.ask("status"))["away"]:
        assert time.monotonic() < until_s, "it was not seen"
        time.sleep(LOOK_S)
    assert (told["lost"], told["fenced"]) == (0, {})
    cut.host.restore()
    world.each_is_right()
    world.until_whole(donors_lost=0)
    assert cut.ask("status")["lost"] == 0
    assert cut.ask("write 7") == "written"
    world.each_is_right()
