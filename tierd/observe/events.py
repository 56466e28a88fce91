# SPDX-License-Identifier: Apache-2.0
"""What happened: the daemon's log, kept as a bounded history of events over restarts.

An event is a log record with a kind and fields beside its message, so that the log, systemd's
journal and the history are told the same, once::

    log.info("watching process %d (%s)", pid, command, extra=event("target.new", pid=pid))

The history is a file of lines, of which this is one::

    {"id":17,"time":"2026-11-21T18:46:40.123+00:00","level":"info","kind":"target.new",
     "message":"watching process 640 (redis-server)","fields":{"pid":640}}

Ids rise by one from event to event, over restarts too, so that a reader can go on where it was.
"""

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NAME = "events.jsonl"
FILE_BYTES = 1 << 20
"""At this size the file is put aside as events.jsonl.1, in place of the one before."""

MOST_EVENTS = 2000
"""So many are kept in memory to be asked for."""

PLAIN = "message"
"""The kind of a record that says none."""

_ATTRIBUTE = "tierd"
"""Of a record. In the journal its parts are EXTRA_TIERD_KIND, EXTRA_TIERD_PID, and so on."""


def event(kind: str, **fields: Any) -> dict[str, Any]:
    """Returns what makes a log record an event, as its `extra`.

    Args:
        kind: what happened, such as "target.new".
        fields: about what, as JSON has it.
    """
    return {_ATTRIBUTE: {"kind": kind, **fields}}


class History(logging.Handler):
    """Keeps what is logged from INFO on, in memory and in a folder.

    Where the folder cannot be written, as when its disk is full, what happens is kept in memory
    all the same, and `trouble` tells why.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.INFO)
        self.trouble: str | None = None
        self._path = folder / NAME
        self._old = folder / f"{NAME}.1"
        self._events = deque(self._read_back(), MOST_EVENTS)
        self._last_id: int = self._events[-1]["id"] if self._events else 0

    def emit(self, record: logging.LogRecord) -> None:
        self._last_id += 1
        happened = _as_dict(self._last_id, record)
        self._events.append(happened)
        try:
            self._write(json.dumps(happened, separators=(",", ":")))
            self.trouble = None
        except OSError as error:
            self.trouble = f"events are not kept over a restart: {error.strerror}: {self._path}"

    def recent(self, *, after: int = 0, most: int = MOST_EVENTS) -> Sequence[Mapping[str, Any]]:
        """Returns the latest events, oldest first.

        Args:
            after: leave out those up to this id.
            most: return so many at most.
        """
        events = [happened for happened in self._events.copy() if happened["id"] > after]
        return events[-most:]

    def _write(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            size = file.tell()
        if size > FILE_BYTES:
            self._path.replace(self._old)

    def _read_back(self) -> Iterator[dict[str, Any]]:
        """Yields what earlier daemons have left, less what a crash or a full disk has torn."""
        for path in (self._old, self._path):
            with suppress(OSError), path.open("rb") as file:
                for line in file.read(2 * FILE_BYTES).splitlines():
                    with suppress(ValueError, TypeError, KeyError, RecursionError):
                        happened = json.loads(line)
                        yield {**happened, "id": int(happened["id"])}


def _as_dict(number: int, record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, _ATTRIBUTE, {}))
    kind = fields.pop("kind", PLAIN)
    time = datetime.fromtimestamp(record.created, UTC)
    return {
        "id": number,
        "time": time.isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "kind": kind,
        "message": record.getMessage(),
        "fields": fields,
    }
