# SPDX-License-Identifier: Apache-2.0
"""The daemon's API: each operation once."""

from collections.abc import Mapping
from typing import Any, Protocol

from tierd.api import schemas
from tierd.api.operation import TEXT, Operation
from tierd.api.schemas import Schema
from tierd.api.view import View
from tierd.model import Pin


class Commands(Protocol):
    """What changes a running daemon. Each returns once the loop has done it."""

    def pause(self) -> Mapping[str, Any]: ...
    def resume(self) -> Mapping[str, Any]: ...
    def pin(self, pid: int, pin: Pin | None, part: range | None = None) -> Mapping[str, Any]: ...
    def drain(self, node: int, *, wanted: bool) -> Mapping[str, Any]: ...
    def set(self, changes: Mapping[str, Any]) -> Mapping[str, Any]: ...
    def record(self) -> Mapping[str, Any]: ...
    def recorded(self, number: int, *, wanted: bool) -> Mapping[str, Any]: ...


_PID: Mapping[str, Schema] = {"pid": schemas.whole(1, 1 << 22)}
_NODE: Mapping[str, Schema] = {"node": schemas.whole(0, 1023)}
_RECORDING: Mapping[str, Schema] = {"id": schemas.whole(0, 2**53 - 1)}


def _part(given: Mapping[str, int] | None) -> range | None:
    return None if given is None else range(int(given["start"]), int(given["end"]))


OPERATIONS: tuple[Operation[View, Commands], ...] = (
    Operation(
        method="GET",
        path="/v1/version",
        summary="The daemon's version, and the API's",
        answer=schemas.VERSION,
        run=lambda view, commands, asked: view.version(),
    ),
    Operation(
        method="GET",
        path="/v1/status",
        summary="What the daemon does, as of its last round",
        answer=schemas.STATUS,
        run=lambda view, commands, asked: view.status(),
    ),
    Operation(
        method="GET",
        path="/v1/topology",
        summary="The machine's memory: nodes, tiers, CXL devices",
        answer=schemas.TOPOLOGY,
        run=lambda view, commands, asked: view.topology(),
    ),
    Operation(
        method="GET",
        path="/v1/targets",
        summary="The processes that are watched",
        answer=schemas.TARGETS,
        run=lambda view, commands, asked: view.targets(),
    ),
    Operation(
        method="GET",
        path="/v1/targets/{pid}",
        summary="How hot each range of a process is, where it lies, and why not elsewhere",
        answer=schemas.EXPLANATION,
        path_parameters=_PID,
        private=True,
        run=lambda view, commands, asked: view.target(asked.path["pid"]),
    ),
    Operation(
        method="GET",
        path="/v1/events",
        summary="What happened lately, oldest first",
        answer=schemas.EVENTS,
        query={
            "after": schemas.whole(0, 2**53 - 1, default=0),
            "most": schemas.whole(1, 2000, default=100),
        },
        run=lambda view, commands, asked: view.events(**asked.query),
    ),
    Operation(
        method="GET",
        path="/v1/config",
        summary="The configuration in force",
        answer=schemas.CONFIG,
        run=lambda view, commands, asked: view.config(),
    ),
    Operation(
        method="GET",
        path="/metrics",
        summary="Metrics in Prometheus' text format",
        answer={"type": "string"},
        media=TEXT,
        run=lambda view, commands, asked: view.metrics(),
    ),
    Operation(
        method="POST",
        path="/v1/pause",
        summary="Move nothing until told to resume; sampling goes on",
        answer=schemas.PAUSED,
        changes=True,
        run=lambda view, commands, asked: commands.pause(),
    ),
    Operation(
        method="POST",
        path="/v1/resume",
        summary="Go on after a pause",
        answer=schemas.PAUSED,
        changes=True,
        run=lambda view, commands, asked: commands.resume(),
    ),
    Operation(
        method="PUT",
        path="/v1/targets/{pid}/pin",
        summary="Keep a process's memory, or a range of it, in the fastest tier, or where it is",
        answer=schemas.PINNED,
        path_parameters=_PID,
        body=schemas.PIN,
        changes=True,
        run=lambda view, commands, asked: commands.pin(
            asked.path["pid"], Pin(asked.body["pin"]), _part(asked.body.get("range"))
        ),
    ),
    Operation(
        method="DELETE",
        path="/v1/targets/{pid}/pin",
        summary="Let a process's memory, or a range of it, be placed as others' is",
        answer=schemas.PINNED,
        path_parameters=_PID,
        query={name: schemas.whole(0, schemas.LAST, default=0) for name in ("start", "end")},
        changes=True,
        run=lambda view, commands, asked: commands.pin(
            asked.path["pid"], None, _part(asked.query) if any(asked.query.values()) else None
        ),
    ),
    Operation(
        method="PUT",
        path="/v1/drains/{node}",
        summary="Take the pages of all processes off a node, and place none there",
        answer=schemas.DRAIN,
        path_parameters=_NODE,
        changes=True,
        run=lambda view, commands, asked: commands.drain(asked.path["node"], wanted=True),
    ),
    Operation(
        method="DELETE",
        path="/v1/drains/{node}",
        summary="End a drain, or use a drained node again",
        answer=schemas.DRAIN,
        path_parameters=_NODE,
        changes=True,
        run=lambda view, commands, asked: commands.drain(asked.path["node"], wanted=False),
    ),
    Operation(
        method="PATCH",
        path="/v1/config",
        summary="Set keys until the daemon ends, whole or not at all; null takes a key back",
        answer=schemas.CHANGES,
        body=schemas.SETTINGS,
        changes=True,
        run=lambda view, commands, asked: commands.set(asked.body),
    ),
    Operation(
        method="POST",
        path="/v1/recordings",
        summary="Begin to record what the daemon sees",
        answer=schemas.BEGUN,
        changes=True,
        run=lambda view, commands, asked: commands.record(),
    ),
    Operation(
        method="PUT",
        path="/v1/recordings/{id}",
        summary="Go on, and fetch what was recorded since it was fetched last, in base64",
        answer=schemas.RECORDED,
        path_parameters=_RECORDING,
        changes=True,
        run=lambda view, commands, asked: commands.recorded(asked.path["id"], wanted=True),
    ),
    Operation(
        method="DELETE",
        path="/v1/recordings/{id}",
        summary="End a recording, and fetch the rest of it",
        answer=schemas.RECORDED,
        path_parameters=_RECORDING,
        changes=True,
        run=lambda view, commands, asked: commands.recorded(asked.path["id"], wanted=False),
    ),
)
