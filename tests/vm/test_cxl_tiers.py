# SPDX-License-Identifier: Apache-2.0
"""CXL memory of two speeds, and that of one."""

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from guests.guest import Guest
from guests.tiering import SETTINGS, tierd, until, within
from guests.topology import Emulator, cxl
from guests.workloads import Hotset, hotset_command, reporting

NEAR, FAR = 2, 3
"""The nodes of the two devices: 0 is the machine's, and 1 is spare."""

FOLDER = "/run/tierd-measured"

HOT_MIB, WARM_MIB, COLD_MIB = 4, 16, 12
SETTLED = 0.9

CGROUP = "/cascade"
MAXIMA = f"dram = {HOT_MIB + 4.7}, cxl = {WARM_MIB - 0.5}"  # 4 MiB are programs and libraries
"""They make the faster tiers small: QEMU's devices cannot do with memory that lies on CXL, which is
where a full node's would go."""

RULE = f"""
[discover]
min_mib = 8.0
[policy]
payback = 0.01  # where each page costs an emulated CPU a millisecond, moves pay off late
[[target]]
cgroup = "{CGROUP}"
[[tenant]]
cgroup = "{CGROUP}"
maximum_mib = {{ {MAXIMA} }}
"""

TWO_SPEEDS = cxl(
    256, 256, emulator=Emulator.FAST, latencies_ns=(100, 500), bandwidths=("10G", "5G")
)


def topology(guest: Guest, *options: str) -> list[dict[str, Any]]:
    """The tiers that tierctl shows."""
    told = guest.run(["tierctl", "topology", "--json", *options], timeout=120).stdout
    return list(json.loads(told)["tiers"])


def on_node(guest: Guest, load: Hotset, node: int) -> float:
    """MiB of a load's buffer, its largest mapping, that a node has."""
    maps = guest.read(f"/proc/{load.pid}/numa_maps").decode().splitlines()
    held = (dict(re.findall(r" N(\d+)=(\d+)", mapping)) for mapping in maps)
    largest = max(held, key=lambda pages: sum(map(int, pages.values())))
    return int(largest.get(str(node), 0)) / 256


@contextmanager
def loads(guest: Guest) -> Iterator[tuple[Hotset, Hotset]]:
    """One that is hot and warm, in the slowest tier, and a cold one in the next, in its way."""
    guest.run(["mkdir", "-p", f"/sys/fs/cgroup{CGROUP}"])
    program = hotset_command(guest)
    warm = ["--mib", f"{HOT_MIB + WARM_MIB}", "--hot-mib", f"{HOT_MIB}", "--share", "80"]
    idle = ["--mib", f"{COLD_MIB}", "--hot-mib", f"{COLD_MIB}"]
    with (
        reporting(guest, within(CGROUP, [*program, *idle, "--node", f"{NEAR}"])) as cold,
        reporting(guest, within(CGROUP, [*program, *warm, "--node", f"{FAR}"])) as busy,
    ):
        cold.sample()
        cold.pause()
        try:
            yield busy, cold
        finally:
            cold.go_on()


@pytest.mark.thorough
@pytest.mark.guest(TWO_SPEEDS)
def test_each_part_of_a_load_comes_to_the_tier_of_its_heat(guest: Guest) -> None:
    def is_settled() -> bool:
        shares = (
            warm.sample().hot_share,
            on_node(guest, warm, NEAR) / WARM_MIB,
            on_node(guest, cold, FAR) / COLD_MIB,
        )
        return min(shares) >= SETTLED

    with loads(guest) as (warm, cold), tierd(guest, settings=RULE) as running:
        running.wait_until_up()
        assert [tier["name"] for tier in (running.status or {})["tiers"]] == ["dram", "cxl", "cxl1"]
        until(warm, running, is_settled)
        ways = {way for way, pages in running.moved.items() if pages}
        assert {("cxl1", "cxl"), ("cxl", "cxl1")} < ways


@pytest.mark.guest(TWO_SPEEDS)
def test_what_is_measured_is_kept_as_tiers(guest: Guest) -> None:
    """The emulator's own speed is what is measured, not what its firmware tells."""
    assert [(tier["name"], tier["latency_ns"]) for tier in topology(guest)] == [
        ("dram", 90),
        ("cxl", 267),
        ("cxl1", 667),
    ]
    guest.run(["mkdir", "-p", FOLDER])
    guest.write(f"{FOLDER}/tierd.toml", SETTINGS.encode())
    config = ("--config", f"{FOLDER}/tierd.toml")
    options = ("--json", "--seconds", "0.5", "--size", "48M", "--save", *config)
    nodes = json.loads(guest.run(["tierctl", "measure", *options], timeout=120).stdout)["nodes"]
    assert [node["id"] for node in nodes] == [0, NEAR, FAR]
    assert all(node["from_node"] == 0 and node["read_latency_ns"] > 0 for node in nodes)
    assert [node["firmware"]["read_latency_ns"] for node in nodes] == [90, 267, 667]
    assert [node["firmware"]["read_bandwidth_mbps"] for node in nodes] == [40960, 10240, 5120]
    assert all(node[f"{way}_bandwidth_mbps"] > 0 for node in nodes for way in ("read", "write"))
    saved = tomllib.loads(guest.read(f"{FOLDER}/tierd.toml.d/50-measured.toml").decode())["tier"]
    assert sorted(node for tier in saved for node in tier["nodes"]) == [0, NEAR, FAR]
    slowest = max(node["read_latency_ns"] for node in nodes)
    assert max(tier["latency_ns"] for tier in saved) == pytest.approx(slowest, abs=1)
    shown = topology(guest, *config)
    assert [{key: tier[key] for key in saved[0]} for tier in shown] == saved


@pytest.mark.guest(cxl(256, 256, interleaved=True))
def test_interleaved_devices_are_one_tier(guest: Guest) -> None:
    assert [(tier["name"], tier["nodes"]) for tier in topology(guest)] == [
        ("dram", [0]),
        ("cxl", [1]),
    ]
