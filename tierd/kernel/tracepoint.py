# SPDX-License-Identifier: Apache-2.0
"""Where the tracepoint damon:damon_aggregated is, and how its records are laid out.

Follows Documentation/trace/events.rst. The layout is never assumed but read from the `format` file
in tracefs, of which a field is a line:

    name: damon_aggregated
    ID: 767
    format:
        field:unsigned short common_type;	offset:0;	size:2;	signed:0;
        field:unsigned long target_id;	offset:8;	size:8;	signed:0;
        field:unsigned int nr_regions;	offset:16;	size:4;	signed:0;
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path

from tierd.kernel.ring import Layout

TRACEFS = ("sys/kernel/tracing", "sys/kernel/debug/tracing")
_EVENT = "events/damon/damon_aggregated"
_FIELD = re.compile(r"^\tfield:[^;]*?(\w+);\s*offset:(\d+);\s*size:(\d+);", re.MULTILINE)
_BYTES = {
    "target_id": 8,
    "nr_regions": 4,
    "start": 8,
    "end": 8,
    "nr_accesses": 4,
    "age": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracepoint:
    """The id that perf_event_open(2) takes, and the layout of the raw records."""

    id: int
    layout: Layout


def find(root: Path = Path("/")) -> Tracepoint | None:
    """Returns the tracepoint; None where tracefs or the event is missing or out of reach."""
    for tracefs in TRACEFS:
        event = root / tracefs / _EVENT
        try:
            layout = parse_format((event / "format").read_text())
            return Tracepoint(id=int((event / "id").read_text()), layout=layout)
        except OSError:
            continue
        except ValueError:
            return None
    return None


def parse_format(text: str) -> Layout:
    """Returns where the fields are.

    Raises:
        ValueError: a field is missing, or of a size that the ring's reader doesn't know.
    """
    found = {name: (int(offset), int(size)) for name, offset, size in _FIELD.findall(text)}
    for name, size in _BYTES.items():
        if found.get(name, (0, 0))[1] != size:
            raise ValueError(f"damon_aggregated: {name} is not a field of {size} bytes")
    return Layout(**{field.name: found[field.name][0] for field in fields(Layout)})
