# SPDX-License-Identifier: Apache-2.0
"""The kernel's DAMON moves by itself, by the policy that tierd hands to it."""

import pytest
from guests.damon import footprint
from guests.guest import Guest
from guests.kernels import Kernel
from guests.tiering import Tierd, ballast, counter, start_tierd, tell, tierd
from guests.topology import slow_node
from guests.workloads import Hotset, hotset

HOT_MIB, BUFFER_MIB, FREE_MIB = 48, 192, 70
"""Of FREE_MIB some 19 are headroom: there is room for one hot window, and not for two."""
HOT_PAGES = HOT_MIB * 256
ARRIVED, WITHIN_S, REST_ROUNDS = 0.9, 120, 9

RULE = """
[migrate]
engine = "damos"
[[target]]
command = "hotset"
[policy]
latency_gap_ns = 400.0  # an emulated CPU accesses memory twenty times less often than a real one
"""


@pytest.mark.thorough
@pytest.mark.guest(slow_node(), only=Kernel.LATEST)
def test_the_kernel_moves_a_hot_window_up_and_a_cold_one_down(guest: Guest) -> None:
    as_it_was, migrated = footprint(guest), counter(guest, "pgmigrate_success")
    options = ("--mib", f"{BUFFER_MIB}", "--hot-mib", f"{HOT_MIB}", "--share", "98")
    with tierd(guest, settings=RULE) as running:
        running.wait_until_up()
        with ballast(guest, FREE_MIB), hotset(guest, *options, "--node", "1") as load:
            arrive(load, running, window=0)
            told = rested(load, running)
            moves = counter(guest, "pgmigrate_success") - migrated
            assert abs(sum(told.values()) - moves) <= 0.05 * moves, running.status
            tell(guest, "pause")
            at_pause = rested(load, running)
            load.move_window()
            assert rested(load, running) == at_pause
            tell(guest, "resume")
            arrive(load, running, window=1)
            told = rested(load, running)
            assert min(told.values()) > 0.2 * HOT_PAGES, running.status
            # What else the kernel migrates in a full node is counted there too.
            assert sum(told.values()) <= counter(guest, "pgmigrate_success") - migrated
            assert running.moved == {}
    assert footprint(guest) == as_it_was


@pytest.mark.guest(slow_node(), only=Kernel.LTS)
def test_a_kernel_that_cannot_is_refused(guest: Guest) -> None:
    as_it_was = footprint(guest)
    done = start_tierd(guest, settings=RULE).wait(WITHIN_S)
    assert done.rc == 1
    assert "DAMON of this kernel cannot place memory by itself" in done.stderr
    assert "no goal node_mem_used_bp" in done.stderr
    assert 'set engine = "move_pages" in [migrate]' in done.stderr
    assert footprint(guest) == as_it_was


def arrive(load: Hotset, running: Tierd, *, window: int) -> None:
    """Waits until most of the window of that number is in the fast node."""
    seen = []
    for sample in load.samples(WITHIN_S):
        seen.append((sample.t, sample.hot_share, moved(running)))
        if sample.window == window and sample.hot_share >= ARRIVED:
            return
    raise AssertionError(f"{seen} {running.status} {running.process.stderr}")


def rested(load: Hotset, running: Tierd) -> dict[str, int]:
    """What was moved, once so many rounds have told the same: each third asks the kernel."""
    told, since = moved(running), rounds(running)
    for _ in load.samples(WITHIN_S):
        now = moved(running)
        if now != told:
            told, since = now, rounds(running)
        elif rounds(running) >= since + REST_ROUNDS:
            return told
    raise AssertionError(f"no rest: {running.status} {running.process.stderr}")


def moved(running: Tierd) -> dict[str, int]:
    """Pages that tierd says the kernel has moved, by the scheme's action."""
    status = running.status
    assert status is not None
    return {scheme["action"]: scheme["pages"] for scheme in status["schemes"]}


def rounds(running: Tierd) -> int:
    status = running.status
    assert status is not None
    return int(status["rounds"])
