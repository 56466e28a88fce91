# SPDX-License-Identifier: Apache-2.0
"""Where a tracepoint is, and how its records are laid out.

Follows Documentation/trace/events.rst. The layout is never assumed but read from the `format` file
in tracefs, of which a field is a line:

    name: cxl_poison
    ID: 1356
    format:
        field:unsigned short common_type;	offset:0;	size:2;	signed:0;
        field:__data_loc char[] memdev;	offset:8;	size:4;	signed:0;
        field:int log;	offset:16;	size:4;	signed:1;
        field:char uuid[16];	offset:68;	size:16;	signed:0;
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tierd.kernel import text
from tierd.kernel.ring import Layout

TRACEFS = ("sys/kernel/tracing", "sys/kernel/debug/tracing")
FORMAT_BYTES = 1 << 16
"""Sixteen times the longest of those read here, of which most is how to print it."""

_DAMON = "damon/damon_aggregated"
_FIELD = re.compile(
    r"^\tfield:([^;]*?)(\w+)(\[\w*\])?;\s*offset:(\d+);\s*size:(\d+);(?:\s*signed:(\d);)?",
    re.MULTILINE,
)
_BYTES = {
    "target_id": 8,
    "nr_regions": 4,
    "start": 8,
    "end": 8,
    "nr_accesses": 4,
    "age": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Where a record keeps a field, in bytes.

    One that `is_dynamic` holds the place of a string: where it begins, and its length in the upper
    two bytes.
    """

    offset: int
    size: int
    is_signed: bool = False
    is_array: bool = False
    is_dynamic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A tracepoint's id for perf_event_open(2), and its fields by name."""

    id: int
    fields: Mapping[str, Field]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracepoint:
    """DAMON's: the id that perf_event_open(2) takes, and the layout of the raw records."""

    id: int
    layout: Layout


def find(root: Path = Path("/")) -> Tracepoint | None:
    """Returns DAMON's tracepoint; None where tracefs or the event is missing or out of reach."""
    found = read_format(_DAMON, root)
    if found is None:
        return None
    try:
        return Tracepoint(id=found.id, layout=_layout(found.fields))
    except ValueError:
        return None


def read_format(event: str, root: Path = Path("/")) -> Format | None:
    """Returns a tracepoint, such as cxl/cxl_poison, by its id and fields.

    None where tracefs or the event is missing or out of reach, or is in no form that is known.
    """
    for tracefs in TRACEFS:
        folder = root / tracefs / "events" / event
        try:
            told, number = text.read(folder / "format", FORMAT_BYTES), text.read(folder / "id")
            if told is not None and number is not None:
                return Format(id=int(number), fields=parse_fields(told))
        except (OSError, ValueError, text.UnexpectedContent):
            continue
    return None


def parse_fields(told: str) -> Mapping[str, Field]:
    """Returns the fields of a `format` file by their names."""
    return {
        name: Field(
            offset=int(offset),
            size=int(size),
            is_signed=signed == "1",
            is_array=bool(array),
            is_dynamic=kind.startswith("__data_loc"),
        )
        for kind, name, array, offset, size, signed in _FIELD.findall(told)
    }


def parse_format(told: str) -> Layout:
    """Returns where the fields of damon_aggregated are.

    Raises:
        ValueError: a field is missing, or of a size that the ring's reader doesn't know.
    """
    return _layout(parse_fields(told))


def _layout(found: Mapping[str, Field]) -> Layout:
    for name, size in _BYTES.items():
        if name not in found or found[name].size != size:
            raise ValueError(f"damon_aggregated: {name} is not a field of {size} bytes")
    return Layout(**{field.name: found[field.name].offset for field in fields(Layout)})
