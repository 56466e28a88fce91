# SPDX-License-Identifier: Apache-2.0
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from tierd.daemon import Daemon
from tierd.model import Pid, Pin
from tierd.recorder import Recordings


class FakeCommands:
    """Fakes of the commands, which note what was commanded; `refuses` is raised instead."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.refuses: Exception | None = None
        self.was_set: list[Mapping[str, Any]] = []
        self.recordings = daemon.record = Recordings(None)

    def pause(self) -> Mapping[str, Any]:
        self.daemon.paused = True
        return {"paused": True}

    def resume(self) -> Mapping[str, Any]:
        self.daemon.paused = False
        return {"paused": False}

    def pin(self, pid: int, pin: Pin | None, part: range | None = None) -> Mapping[str, Any]:
        self.daemon.targets.pin(Pid(pid), pin, part)
        return {"pid": pid, "pin": pin, "pins": self.daemon.targets.pins(Pid(pid))}

    def drain(self, node: int, *, wanted: bool) -> Mapping[str, Any]:
        account = {"node": node, "done": True, "moved_pages": 7, "in_use": 0, "left": {"busy": 2}}
        return account | {"passes": 1, "processes": 3, "processes_left": 0}

    def record(self) -> Mapping[str, Any]:
        return {"id": self.recordings.begin()}

    def recorded(self, number: int, *, wanted: bool) -> Mapping[str, Any]:
        if wanted:
            self.daemon.round()
            data, ended = self.recordings.fetch(number)
        else:
            data, ended = self.recordings.end(number), None
        return {"data": b64encode(data).decode(), "ended": ended}

    def set(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.refuses is not None:
            raise self.refuses
        self.was_set.append(changes)
        made = [
            {"key": f"{table}.{key}", "before": None, "after": value}
            for table, keys in changes.items()
            for key, value in keys.items()
        ]
        return {"changes": made, "set": changes}
