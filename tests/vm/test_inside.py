# SPDX-License-Identifier: Apache-2.0
"""Runs tests/vm/inside and tests/vm/sampling in a guest.

There both tiers and their kernel are at hand, and DAMON is free to be held, shared and taken away.
"""

import pytest
from guests.guest import Guest
from guests.topology import slow_node
from guests.workloads import build

FOLDERS = ("tests/vm/inside", "tests/vm/sampling")
UNUSED = ("schemathesis", "anyio", "xdist")
"""Plugins that these tests don't use: to import them takes half a minute where all is emulated."""


@pytest.mark.central
@pytest.mark.guest(slow_node())
def test_inside(guest: Guest) -> None:
    build("hotset")
    options = (option for plugin in UNUSED for option in ("-p", f"no:{plugin}"))
    done = guest.run(
        ["pytest", "-q", "-p", "no:cacheprovider", *options, *FOLDERS],
        env={"TIERD_IN_GUEST": "1"},
        timeout=500,
        check=False,
    )
    assert done.rc == 0, done.stdout + done.stderr
