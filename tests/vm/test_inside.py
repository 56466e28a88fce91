# SPDX-License-Identifier: Apache-2.0
"""Runs tests/vm/inside in a guest, where both tiers and their kernel are at hand."""

import pytest
from guests.guest import Guest
from guests.topology import slow_node


@pytest.mark.central
@pytest.mark.guest(slow_node())
def test_inside(guest: Guest) -> None:
    done = guest.run(
        ["pytest", "-q", "-p", "no:cacheprovider", "tests/vm/inside"],
        env={"TIERD_IN_GUEST": "1"},
        timeout=300,
        check=False,
    )
    assert done.rc == 0, done.stdout + done.stderr
