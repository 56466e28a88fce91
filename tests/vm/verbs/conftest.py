# SPDX-License-Identifier: Apache-2.0
"""Tests over Soft-RoCE that run inside a guest; tests/vm/test_verbs.py starts them there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

collect_ignore_glob = [] if os.environ.get("TIERD_IN_GUEST") else ["test_*.py"]

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
MTU = 4096
"""Bytes that a packet carries at most."""


@pytest.fixture
def carried() -> Callable[[], int]:
    """Tells how many bytes rxe0 can have carried since the test began."""

    def sent() -> int:
        return int((COUNTERS / "sent_pkts").read_text()) * MTU

    before = sent()
    return lambda: sent() - before
