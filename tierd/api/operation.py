# SPDX-License-Identifier: Apache-2.0
"""One operation of an API, from which the server's route and its part of OpenAPI follow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tierd.api.schemas import Schema

JSON, TEXT = "application/json", "text/plain"

V = TypeVar("V")
"""What can be asked."""

C = TypeVar("C")
"""What can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request's parameters, checked against the operation's schemas. `body` is None without."""

    path: Mapping[str, int]
    query: Mapping[str, int]
    body: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[V, C]):
    """One method of one path.

    Args:
        path: as OpenAPI spells it; its parameters are whole numbers, as are those of `query`.
        summary: a line for the document.
        answer: what it answers with, as JSON Schema.
        run: makes the answer. `view` may be asked from any thread.
        body: what it takes, as JSON Schema.
        changes: whether it changes anything; such a one is not on the read-only socket.
        private: whether it tells of a process's memory, and so is not on the read-only socket.
    """

    method: str
    path: str
    summary: str
    answer: Schema
    run: Callable[[V, C, Asked], Any]
    media: str = JSON
    path_parameters: Mapping[str, Schema] = field(default_factory=dict)
    query: Mapping[str, Schema] = field(default_factory=dict)
    body: Schema | None = None
    changes: bool = False
    private: bool = False

    @property
    def is_for_monitoring(self) -> bool:
        return not (self.changes or self.private)
