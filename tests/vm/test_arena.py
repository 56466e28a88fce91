# SPDX-License-Identifier: Apache-2.0
"""An arena on two nodes, steered by the daemon that an operator runs."""

import signal
import time
from typing import Any

import pytest
from guests.guest import Guest
from guests.tiering import FOLDER, WITHIN_S, Tierd, tierd
from guests.topology import slow_node

SETTINGS = """
[arena]
enabled = true
"""


@pytest.mark.guest(slow_node())
def test_the_hot_blocks_of_a_program_come_to_dram(guest: Guest) -> None:
    with tierd(guest, settings=SETTINGS) as running:
        running.wait_until_up()
        command = ["python3", "tests/vm/workloads/skewed_arena.py", f"{FOLDER}/run/arena.sock"]
        program = guest.start(command)
        try:
            hot, fast = map(int, program.readline(120).split())
            assert fast == 0
            deadline = time.monotonic() + WITHIN_S
            while fast < hot:
                assert time.monotonic() < deadline, f"{running.status} {running.process.stderr}"
                hot, fast = map(int, program.readline(60).split())
            shown = guest.run(["tierctl", "status", "--config", f"{FOLDER}/tierd.toml"]).stdout
            assert "skewed" in shown
            [arena] = arenas(running)
            assert (arena["name"], arena["pid"]) == ("skewed", program.pid)
            assert arena["moved"] >= hot
        finally:
            program.signal(signal.SIGKILL)
            program.wait()
        deadline = time.monotonic() + WITHIN_S
        while arenas(running):
            assert time.monotonic() < deadline, running.status
            time.sleep(0.5)


def arenas(running: Tierd) -> list[dict[str, Any]]:
    status = running.status
    assert status is not None
    found: list[dict[str, Any]] = status["arenas"]
    return found
