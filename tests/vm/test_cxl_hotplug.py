# SPDX-License-Identifier: Apache-2.0
"""A CXL device that is drained, plugged out, plugged in and used while tierd runs."""

import pytest
from guests.guest import Guest
from guests.tiering import FOLDER, Tierd, tierd, until
from guests.topology import Emulator, cxl
from guests.workloads import hotset

MACHINE = cxl(512, emulator=Emulator.FAST)
WITHIN_S = 120
BUFFER_MIB, HOT_MIB = 32, 4
SIZES = ("--mib", f"{BUFFER_MIB}", "--hot-mib", f"{HOT_MIB}", "--share", "95", "--node", "0")
RULE = """
[policy]
horizon_s = 300  # moving pays off late where each page costs an emulated CPU so much
[[target]]
command = "hotset"
"""
LOST = ", of which a CXL device has gone: what lies there is lost"


def tiers(running: Tierd) -> list[str]:
    return [tier["name"] for tier in (running.status or {"tiers": []})["tiers"]]


def says(running: Tierd, *lines: str) -> bool:
    told = running.process.stderr.splitlines()
    return all(f"tierd: {line}" in told for line in lines)


def promoted(running: Tierd) -> int:
    return running.moved.get(("cxl", "dram"), 0)


def tierctl(guest: Guest, *words: str) -> str:
    command = ["tierctl", *words, "--config", f"{FOLDER}/tierd.toml"]
    return guest.run(command, timeout=WITHIN_S).stdout


@pytest.mark.guest(MACHINE)
def test_a_device_goes_comes_back_and_is_used(guest: Guest) -> None:
    with hotset(guest, *SIZES) as load, tierd(guest, settings=RULE) as running:
        until(load, running, lambda: tiers(running) == ["dram", "cxl"])
        tierctl(guest, "cxl", "drain")
        until(load, running, lambda: tiers(running) == ["dram"])
        guest.unplug()
        until(load, running, lambda: says(running, "CXL device mem0 has gone"))
        rounds = (running.status or {})["rounds"]
        until(load, running, lambda: (running.status or {})["rounds"] > rounds + 2)

        guest.plug()
        until(load, running, lambda: says(running, "CXL device mem0 has come"))
        tierctl(guest, "cxl", "create")
        until(load, running, lambda: tiers(running) == ["dram", "cxl"])
        assert says(running, "there are 2 tiers now: placing goes on")
        before = promoted(running)
        guest.run(["migratepages", str(load.pid), "0", "1"], timeout=WITHIN_S)
        hot_pages = HOT_MIB * 256
        until(load, running, lambda: promoted(running) - before >= 0.9 * hot_pages)
        until(load, running, lambda: load.sample().hot_share >= 0.95)


@pytest.mark.thorough
@pytest.mark.guest(MACHINE)
def test_a_device_that_is_taken_out_with_its_memory_online_is_told(doomed_guest: Guest) -> None:
    """The kernel lets it go all the same. What lies there would be lost, but for QEMU."""
    guest = doomed_guest
    with hotset(guest, *SIZES) as load, tierd(guest, settings=RULE) as running:
        until(load, running, lambda: tiers(running) == ["dram", "cxl"])
        guest.unplug()
        until(load, running, lambda: LOST in running.process.stderr)
        until(load, running, lambda: tiers(running) == ["dram"])
        assert says(running, "CXL device mem0 has gone")
        assert any(LOST in note for note in (running.status or {})["notes"])
        assert LOST in tierctl(guest, "topology")
