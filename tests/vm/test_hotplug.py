# SPDX-License-Identifier: Apache-2.0
"""Memory and its devices that go and come back while tierd runs."""

import pytest
from guests.guest import Guest
from guests.tiering import Tierd, tierd, until
from guests.topology import Emulator, cxl, slow_node
from guests.workloads import Hotset, hotset

DAX = "dax0.0"
BUFFER_MIB, HOT_MIB = 32, 4

TIMES = 3
"""Looking at the tiers while one goes locked up the kernel every third time (decision 12)."""

MAKE_REGION = """
from guests.provision import *
make_region(root_decoders()[0], endpoint_decoders())
wait("memory of the region", lambda: len(memory_only_nodes()) == 1)
"""
"""As at the guest's start."""

RULE = """
[policy]
horizon_s = 300  # moving pays off late where each page costs an emulated CPU so much
[[target]]
command = "hotset"
"""


def daxctl(guest: Guest, *arguments: str) -> None:
    guest.run(["daxctl", *arguments, DAX], timeout=120)


def tiers(running: Tierd) -> list[str]:
    return [tier["name"] for tier in (running.status or {"tiers": []})["tiers"]]


def says(running: Tierd, *lines: str) -> bool:
    """Whether its log has these lines, in this order, not necessarily next to each other."""
    told = iter(running.process.stderr.splitlines())
    return all(f"tierd: {line}" in told for line in lines)


def promoted(running: Tierd) -> int:
    return running.moved.get(("pmem", "dram"), 0)


def put_on(guest: Guest, load: Hotset, node: int) -> None:
    """Moves all of the workload's memory, as a restart on that node would have."""
    guest.run(["migratepages", str(load.pid), "0,1", str(node)], timeout=120)


@pytest.mark.guest(slow_node())
def test_a_tier_goes_and_placing_goes_on_when_it_is_back(guest: Guest) -> None:
    options = ("--mib", f"{BUFFER_MIB}", "--hot-mib", f"{HOT_MIB}", "--share", "95")
    with (
        hotset(guest, *options, "--node", "1") as load,
        tierd(guest, settings=RULE) as running,
    ):
        until(load, running, lambda: load.sample().hot_share >= 0.95)
        assert tiers(running) == ["dram", "pmem"]
        try:
            daxctl(guest, "offline-memory")
            until(load, running, lambda: tiers(running) == ["dram"])
            assert says(running, "tier pmem has gone"), running.process.stderr
            daxctl(guest, "online-memory")
            until(load, running, lambda: tiers(running) == ["dram", "pmem"])
            daxctl(guest, "offline-memory")
            until(load, running, lambda: says(running, *("tier pmem has gone",) * 2))
            for action in ("online-memory", "offline-memory") * TIMES:
                daxctl(guest, action)  # may be over before anybody has looked
            rounds = (running.status or {})["rounds"]
            until(load, running, lambda: (running.status or {})["rounds"] > rounds + 5)
            until(load, running, lambda: tiers(running) == ["dram"])
            assert any("no second memory node" in note for note in (running.status or {})["notes"])
            rounds, moved = (running.status or {})["rounds"], promoted(running)
            until(load, running, lambda: (running.status or {})["rounds"] > rounds + 3)
            assert promoted(running) == moved > 0

            daxctl(guest, "reconfigure-device", "--mode=devdax", "--force")
            let_go = f"dax device {DAX} has the driver device_dax now"
            until(load, running, lambda: says(running, let_go))
        finally:
            daxctl(guest, "reconfigure-device", "--mode=system-ram", "--force")
        until(load, running, lambda: tiers(running) == ["dram", "pmem"])
        assert says(running, "tier pmem has gone", "tier 1: pmem, nodes 1"), running.process.stderr
        put_on(guest, load, 1)
        # First this: a sample may be of the second before, and a round tells its moves at its end.
        until(load, running, lambda: promoted(running) >= moved + 0.9 * HOT_MIB * 256)
        until(load, running, lambda: load.sample().hot_share >= 0.95)


@pytest.mark.thorough
@pytest.mark.guest(cxl(512, emulator=Emulator.FAST))
def test_a_cxl_region_is_taken_apart_and_made_again(guest: Guest) -> None:
    """The workload is on node 0 and only tells the time."""
    options = ("--mib", "16", "--hot-mib", f"{HOT_MIB}", "--share", "95", "--node", "0")
    with hotset(guest, *options) as load, tierd(guest, settings=RULE) as running:
        until(load, running, lambda: tiers(running) == ["dram", "cxl"])
        daxctl(guest, "offline-memory")
        try:
            for step in ("disable-region", "destroy-region"):
                guest.run(["cxl", step, "region0"], timeout=120)
            until(load, running, lambda: says(running, "CXL region region0 has gone"))
            until(load, running, lambda: tiers(running) == ["dram"])
            gone = ("tier cxl has gone", f"dax device {DAX} has gone")
            assert all(says(running, line) for line in gone), running.process.stderr
        finally:
            guest.run(["python3", "-c", MAKE_REGION], timeout=120)
        back = (
            "CXL region region0 has come",
            f"dax device {DAX} has come",
            "node 1 has memory now, 512 MiB (cxl)",
            "tier 1: cxl, nodes 1",
            "there are 2 tiers now: placing goes on",
        )
        until(load, running, lambda: says(running, *back))
        until(load, running, lambda: tiers(running) == ["dram", "cxl"])
        assert not [note for note in (running.status or {})["notes"] if "online" in note]
