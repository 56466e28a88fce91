# SPDX-License-Identifier: Apache-2.0
"""Runs pytest in a guest, on tests that only make sense there."""

from collections.abc import Mapping

from guests.guest import Guest

UNUSED = ("schemathesis", "anyio", "xdist")
"""Plugins that these tests don't use: to import them takes half a minute where all is emulated."""


def run_tests(guest: Guest, *folders: str, env: Mapping[str, str] | None = None) -> None:
    """Has them all pass."""
    options = (option for plugin in UNUSED for option in ("-p", f"no:{plugin}"))
    done = guest.run(
        ["pytest", "-q", "-p", "no:cacheprovider", *options, *folders],
        env={"TIERD_IN_GUEST": "1", **(env or {})},
        timeout=500,
        check=False,
    )
    assert done.rc == 0, done.stdout + done.stderr
