# SPDX-License-Identifier: Apache-2.0
"""Runs tests/vm/inside and tests/vm/sampling in a guest.

There both tiers and their kernel are at hand, and DAMON is free to be held, shared and taken away.
By default it is the older kernel: other tests have the latest.
"""

import pytest
from guests.guest import Guest
from guests.inside import run_tests
from guests.kernels import Kernel
from guests.topology import slow_node
from guests.workloads import build


@pytest.mark.guest(slow_node(), kernel=Kernel.LTS)
def test_inside(guest: Guest) -> None:
    build("hotset")
    run_tests(guest, "tests/vm/inside", "tests/vm/sampling")
