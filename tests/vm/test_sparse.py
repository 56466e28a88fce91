# SPDX-License-Identifier: Apache-2.0
"""Every second page is hot, and the fast node has room for the hot ones alone."""

import pytest
from guests.guest import Guest
from guests.tiering import Tierd, ballast, tierd, until
from guests.topology import slow_node
from guests.workloads import hotset

HOT_MIB, BUFFER_MIB, FREE_MIB = 32, 96, 76
"""The hot pages lie in twice HOT_MIB; of FREE_MIB some 19 are headroom, and as much may be taken by
the programs and the kernel."""
FOUND, FIND_S = 0.9, 300
LEAST_SAMPLES = 64

RULE = """
zoom = true  # in [damon], which stands before this
[[target]]
command = "hotset"
[policy]
latency_gap_ns = 400.0  # moves take an emulated CPU twenty times as long
"""


@pytest.mark.guest(slow_node())
def test_sparse_hot_pages_are_found(guest: Guest) -> None:
    options = ("--mib", f"{BUFFER_MIB}", "--hot-mib", f"{HOT_MIB}", "--share", "98", "--stride")
    with tierd(guest, settings=RULE) as running:
        running.wait_until_up()
        with ballast(guest, FREE_MIB), hotset(guest, *options, "--node", "1") as load:
            seen = [load.sample()]
            for sample in load.samples(FIND_S):
                seen.append(sample)
                if sample.hot_share >= FOUND:
                    break
            shares = [round(sample.hot_share, 2) for sample in seen]
            assert shares[-1] >= FOUND, f"{shares} {running.status}"


@pytest.mark.guest(slow_node())
def test_page_faults_come_as_samples_of_hardware_would(guest: Guest) -> None:
    with tierd(guest, settings=RULE + '[hardware]\nsamples = "page-faults"\n') as running:
        running.wait_until_up()
        with hotset(guest, "--mib", "64", "--hot-mib", "8", "--node", "1") as load:
            until(load, running, lambda: samples(running) > LEAST_SAMPLES)
        assert running.status
        assert running.status["sampler"]["hardware"]["source"] == "page-faults"


def samples(running: Tierd) -> int:
    """How many it has taken in."""
    status = running.status or {"sampler": {"hardware": {"samples": 0}}}
    return int(status["sampler"]["hardware"]["samples"])
