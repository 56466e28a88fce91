# SPDX-License-Identifier: Apache-2.0
"""tierctl cxl create against the kernel's own sysfs."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from guests.guest import Completed, Guest
from guests.topology import Emulator, Topology, cxl

MIB = 1 << 20
AUTO_ONLINE = "/sys/devices/system/memory/auto_online_blocks"
FOLDER = "/run/tierd-cxl"
ONE = cxl(512, emulator=Emulator.FAST)
TWO = cxl(256, 256, interleaved=True)
WITHIN_S = 120
KILLS_WITHIN_S = 540

TOUCH = "import mmap; m = mmap.mmap(-1, 8 << 20); m.write(b'x' * (8 << 20))"


def tierctl(guest: Guest, *words: str, check: bool = True) -> Completed:
    command = ["tierctl", "cxl", *words, "--config", f"{FOLDER}/tierd.toml"]
    return guest.run(command, timeout=WITHIN_S, check=check)


def document(guest: Guest, *words: str) -> Any:
    return json.loads(tierctl(guest, *words, "--json").stdout)


def memdevs(topology: Topology) -> list[str]:
    return [f"mem{number}" for number in range(len(topology.slow_mib))]


@pytest.fixture
def free(guest: Guest) -> Iterator[Guest]:
    """The guest with its CXL memory free, and new memory left offline; as it was in the end."""
    policy = guest.read(AUTO_ONLINE)
    guest.run(["mkdir", "-p", FOLDER])
    guest.write(f"{FOLDER}/tierd.toml", f'[daemon]\nstate_dir = "{FOLDER}/state"\n'.encode())
    regions(guest, "free")
    guest.write(AUTO_ONLINE, b"offline")
    yield guest
    guest.write(AUTO_ONLINE, policy)
    regions(guest, "make", *memdevs(guest.topology))


def regions(guest: Guest, *words: str, timeout: float = WITHIN_S) -> str:
    command = ["python", "-m", "faults.regions", *words]
    one_thread = {"OPENBLAS_NUM_THREADS": "1"}
    return guest.run(command, timeout=timeout, env=one_thread).stdout


@pytest.mark.guest(ONE)
def test_a_device_becomes_a_node(free: Guest) -> None:
    dry = tierctl(free, "create", "--dry-run").stdout
    idle = document(free, "list")
    assert (idle["regions"], idle["nodes"]) == ([], [])
    assert not any(decoder["dpa_bytes"] for decoder in idle["decoders"])
    made = tierctl(free, "create").stdout
    echo = re.compile(r"^echo .*", re.MULTILINE)
    assert echo.findall(made) == echo.findall(dry)
    assert free.read(AUTO_ONLINE).strip() == b"offline"
    found = document(free, "list")
    (region,), (node,), (blocks,) = found["regions"], found["nodes"], found["blocks"]
    assert (region["size_bytes"], region["memdevs"]) == (512 * MIB, ["mem0"])
    assert (blocks["state"], blocks["zones"]) == ("online", ["Movable"])
    assert (node["total_bytes"], node["tier"]) == (512 * MIB, "cxl")
    free.run(["numactl", f"--membind={node['id']}", "python", "-c", TOUCH], timeout=WITHIN_S)
    again = tierctl(free, "create", check=False)
    assert again.rc == 1
    assert "no CXL device of volatile memory alone has 256 MiB free" in again.stderr


@pytest.mark.thorough
@pytest.mark.guest(ONE)
def test_a_part_of_a_device_that_is_left_offline(free: Guest) -> None:
    """Its host bridge has one decoder, as the kernel gives those of one port."""
    tierctl(free, "create", "--size", "256M", "--online", "none")
    found = document(free, "list")
    (region,) = found["regions"]
    assert region["size_bytes"] == 256 * MIB
    assert not any(node["total_bytes"] for node in found["nodes"])
    assert {blocks["state"] for blocks in found["blocks"]} == {"offline"}
    refused = tierctl(free, "create", check=False)
    assert f"is free: decoder1.0 by {region['name']}" in refused.stderr


@pytest.mark.guest(TWO)
def test_two_devices_are_interleaved(free: Guest) -> None:
    made = document(free, "create", "--interleave", "2")
    found = document(free, "list")
    (region,), (node,) = found["regions"], found["nodes"]
    assert (region["interleave_ways"], region["size_bytes"]) == (2, 512 * MIB)
    assert region["memdevs"] == made["memdevs"]
    assert node["total_bytes"] == 512 * MIB


@pytest.mark.timeout(KILLS_WITHIN_S + 120)
@pytest.mark.guest(ONE)
def test_a_kill_at_each_step_leaves_nothing(free: Guest, summary: list[str]) -> None:
    killed_at_each_step(free, summary)


@pytest.mark.thorough
@pytest.mark.timeout(KILLS_WITHIN_S + 120)
@pytest.mark.guest(TWO)
def test_a_kill_at_each_step_of_interleaving_leaves_nothing(
    free: Guest, summary: list[str]
) -> None:
    killed_at_each_step(free, summary)


def killed_at_each_step(free: Guest, summary: list[str]) -> None:
    told = regions(free, "kill", *memdevs(free.topology), timeout=KILLS_WITHIN_S)
    report = json.loads(told)
    assert report["findings"] == []
    assert report["undone"] > 20
    assert report["kept"] > 0
    summary.append(f"cxl create: {report['undone']} kills undone, {report['kept']} kept")
