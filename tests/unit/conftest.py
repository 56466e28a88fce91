# SPDX-License-Identifier: Apache-2.0
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fake_commands import FakeCommands
from tests.unit.machine import HOT, SPAN, FakeSampler, Machine, Memory, half_hot
from tierd.api.server import unix_listener
from tierd.api.view import View
from tierd.leases import Leases, Limits, leasing
from tierd.observe.events import History


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    log = logging.getLogger("tierd")
    log.addHandler(history)
    log.setLevel(logging.INFO)
    yield history
    log.removeHandler(history)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena.sock"


@pytest.fixture
def limits() -> Limits:
    """What arenas that connect there may be; some tests have others."""
    return Limits(arenas=8, blocks=1 << 20)


@pytest.fixture
def leases(path: Path, limits: Limits) -> Iterator[Leases]:
    """The arenas that connect to `path`."""
    with (
        unix_listener(path, 0o600, kind=socket.SOCK_SEQPACKET) as listener,
        leasing(listener, lambda: limits) as leases,
    ):
        yield leases


@pytest.fixture
def commands(machine: Machine, history: History) -> FakeCommands:
    machine.start(HOT, Memory(SPAN))
    daemon = machine.daemon(FakeSampler(half_hot(20), machine))
    machine.rounds(daemon, 8)
    return FakeCommands(daemon)


CXL_ERRORS: dict[str, Any] = {
    "listens": True,
    "lost": 0,
    "errors": [
        {
            "device": "mem0",
            "region": "region0",
            "kind": "poison",
            "severity": "uncorrected",
            "count": 3,
        }
    ],
    "evacuations": [
        {
            "block": 210,
            "node": 1,
            "done": False,
            "moved_pages": 7,
            "left": {"busy": 1},
            "mapped_pages": 1,
            "bad_pages": 3,
        }
    ],
    "fenced": [{"node": 1, "device": "mem0"}],
}


@pytest.fixture
def view(machine: Machine, history: History, commands: FakeCommands) -> View:
    told = {"pid": 1, **machine.told[-1], "config": {}, "set": {}, "drains": [], "cxl": CXL_ERRORS}
    return View(commands.daemon, history, told)
