# SPDX-License-Identifier: Apache-2.0
"""Runs tests/vm/sampling in a guest, where DAMON is free to be held, shared and taken away."""

import pytest
from guests.guest import Guest
from guests.topology import slow_node
from guests.workloads import build


@pytest.mark.central
@pytest.mark.guest(slow_node())
def test_sampling(guest: Guest) -> None:
    build("hotset")
    done = guest.run(
        ["pytest", "-q", "-p", "no:cacheprovider", "tests/vm/sampling"],
        env={"TIERD_IN_GUEST": "1"},
        timeout=500,
        check=False,
    )
    assert done.rc == 0, done.stdout + done.stderr
