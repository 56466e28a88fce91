# SPDX-License-Identifier: Apache-2.0
"""Three donors and two borrowers, each a host: donors end, links are cut, slowed and restored.

Their clocks are days apart, but for that of the day.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from sweeps.donors import DonorProcess, make_keys

from tests.hosts.borrower import BLOCK
from tests.hosts.network import Host, network
from tierd.remote.wire import Keys

PROGRAM = Path(__file__).parent / "borrower.py"
BY_ETH = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
LENT_MIB = 32
WAIT_S, LOOK_S = 90.0, 0.2
"""A donor that was lost is looked for ever more rarely."""

LOOKED_AT = 16 * BLOCK
"""Bytes: each of two borrowers looks at a slow donor every few seconds, 3 blocks at a time."""

MANY = 1000
A_MINUTE_S = 60.0

DONORS, BORROWERS = ("donor-a", "donor-b", "donor-c"), ("borrower-a", "borrower-b")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


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

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def ask(self, line: str) -> Any:
        self.tell(line)
        assert self._process.stdout is not None
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
    donors: list[DonorProcess]
    borrowers: list[Borrower]

    def each_is_right(self) -> None:
        assert {borrower.ask("read") for borrower in self.borrowers} == {"right"}

    def until_whole(self, donors_lost: int) -> None:
        self.until(lambda borrower: borrower.is_whole(donors_lost))

    def until(self, is_so: Callable[[Borrower], bool]) -> None:
        """Waits until it is so of all borrowers."""
        until_s = time.monotonic() + WAIT_S
        while not all(is_so(borrower) for borrower in self.borrowers):
            assert time.monotonic() < until_s, "it did not come to that"
            time.sleep(LOOK_S)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    ca = trustme.CA()
    with network([*DONORS, *BORROWERS]) as hosts, ExitStack() as stack:
        lending, borrowing = hosts[: len(DONORS)], hosts[len(DONORS) :]
        donors: list[DonorProcess] = []
        for host, name in zip(lending, DONORS, strict=True):
            keys = make_keys(tmp_path, ca, name, host.address)
            day_s = str(86_400 * len(donors))
            clock = ["unshare", "--time", "--monotonic", day_s, "--boottime", day_s]
            prefix = [*host.prefix, *clock]
            donors.append(DonorProcess(keys, LENT_MIB, host=host.address, prefix=prefix, by=BY_ETH))
            stack.callback(donors[-1].end)
        addresses = [donor.address for donor in donors]
        borrowers = []
        for host, name in zip(borrowing, BORROWERS, strict=True):
            borrowers.append(Borrower(host, make_keys(tmp_path, ca, name), addresses))
            stack.callback(borrowers[-1].end)
        for seed, borrower in enumerate(borrowers):
            assert borrower.ask(f"write {seed}") == "written"
        yield World(lending, donors, borrowers)


def test_a_link_that_is_cut_and_restored_costs_no_byte(world: World) -> None:
    world.each_is_right()
    world.hosts[0].cut()
    world.each_is_right()
    world.until_whole(donors_lost=1)
    world.hosts[0].restore()
    world.until_whole(donors_lost=0)
    world.hosts[1].cut()
    world.each_is_right()


def test_donors_that_are_stopped_and_killed_cost_no_byte(world: World) -> None:
    stopped, killed, _ = world.donors
    stopped.send(signal.SIGSTOP)
    world.each_is_right()
    world.until_whole(donors_lost=1)
    stopped.send(signal.SIGCONT)
    world.until_whole(donors_lost=0)
    killed.send(signal.SIGKILL)
    world.each_is_right()
    world.until_whole(donors_lost=1)
    stopped.send(signal.SIGKILL)
    world.each_is_right()


def test_a_borrower_that_is_killed_in_mid_write_leaves_nothing(world: World) -> None:
    killed, other = world.borrowers
    killed.tell("rewrite")
    before = killed.host.sent_bytes()
    while killed.host.sent_bytes() < before + MANY * BLOCK:
        time.sleep(LOOK_S)
    killed.end()
    world.until(lambda _: all("borrows nothing" in "".join(d.said) for d in world.donors))
    world.borrowers.remove(killed)
    world.each_is_right()
    assert other.ask("write 7") == "written"
    world.each_is_right()


def test_a_donor_behind_a_slow_link_is_left_for_the_others(world: World) -> None:
    host, slow = world.hosts[0], world.donors[0].address
    host.slow_down()
    for borrower in world.borrowers:
        while slow not in borrower.ask("status")["slow"]:
            assert borrower.ask("read") == "right"
    before = host.sent_bytes()
    world.each_is_right()
    assert host.sent_bytes() - before < LOOKED_AT, "it is looked at, and not read"
    host.speed_up()
    world.until(lambda borrower: borrower.ask("status")["slow"] == [])
    world.until_whole(donors_lost=0)
    world.each_is_right()


@pytest.mark.parametrize(
    "for_s", [0, pytest.param(A_MINUTE_S, marks=pytest.mark.thorough)], ids=["seen", "a-minute"]
)
def test_who_is_cut_off_from_all_donors_finds_everything_again(world: World, for_s: float) -> None:
    cut = world.borrowers[0]
    until_back_s = time.monotonic() + for_s
    cut.host.cut()
    until_s = time.monotonic() + WAIT_S
    while not (told := cut.ask("status"))["away"]:
        assert time.monotonic() < until_s, "it was not seen"
        time.sleep(LOOK_S)
    while (told["lost"], told["fenced"]) == (0, {}) and time.monotonic() < until_back_s:
        time.sleep(LOOK_S)
        told = cut.ask("status")
    assert (told["lost"], told["fenced"]) == (0, {})
    cut.host.restore()
    world.each_is_right()
    world.until_whole(donors_lost=0)
    assert cut.ask("status")["lost"] == 0
    assert cut.ask("write 7") == "written"
    world.each_is_right()
