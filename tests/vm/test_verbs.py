# SPDX-License-Identifier: Apache-2.0
"""Runs tests/vm/verbs in a guest that has Soft-RoCE: real verbs, by a card that is a driver.

# rdma link
link rxe0/1 state ACTIVE physical_state LINK_UP netdev dummy0
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from guests.guest import Guest
from guests.inside import run_tests
from guests.topology import slow_node

BY_VERBS = {"UCX_TLS": "rc", "LD_PRELOAD": "libibverbs.so.1", "UCX_RC_TIMEOUT": "300ms"}
"""No way but RDMA, by the host's libibverbs: the one that NIXL brings knows no Soft-RoCE. That
loses an answer now and then where all is emulated, and asks for it again after so long.
"""


@pytest.mark.guest(slow_node())
def test_verbs(guest: Guest) -> None:
    with soft_roce(guest):
        run_tests(guest, "tests/vm/verbs", env=BY_VERBS)


@contextmanager
def soft_roce(guest: Guest) -> Iterator[None]:
    """Makes rxe0, whose packets come back to itself."""
    guest.run(["modprobe", "-a", "dummy", "ib_uverbs", "rdma_rxe"])
    guest.run(["ip", "link", "add", "dummy0", "mtu", "9000", "type", "dummy"])
    try:
        guest.run(["ip", "address", "add", "10.9.0.1/24", "dev", "dummy0"])
        guest.run(["ip", "link", "set", "dummy0", "up"])
        guest.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "dummy0"])
        yield
    finally:
        guest.run(["ip", "link", "delete", "dummy0"])
