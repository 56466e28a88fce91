# SPDX-License-Identifier: Apache-2.0
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fake_commands import FakeCommands
from tests.unit.machine import HOT, SPAN, FakeSampler, Machine, Memory, half_hot
from tierd.api.view import View
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
