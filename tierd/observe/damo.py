# SPDX-License-Identifier: Apache-2.0
"""Records of damo (https://github.com/damonitor/damo): `damo record`, as 3.4 writes them.

A file is JSON, compressed by zlib unless asked otherwise: a list of records, each of one target's
snapshots, of which there may be just one. Numbers are texts, with commas in between:

    [{"kdamond_idx": 0, "context_idx": 0, "target_id": null,
      "intervals": {"sample_us": "20000", "aggr_us": "400000", ...},
      "snapshots": [{"start_time": "1795329322841705472", "end_time": "1795329323241705472",
                     "regions": [{"start": "94,389,242,056,704", "end": "94,390,073,335,808",
                                  "nr_accesses": {"samples": 0, ...},
                                  "age": {"aggr_intervals": "1", ...}, ...}, ...]}, ...]}, ...]
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tierd.bulk import REGION, Accesses
from tierd.model import Pid
from tierd.observe.recording import BadRecording

MOST_BYTES = 1 << 28
"""Of the JSON; Python's values of it take some ten times as much."""

_STARTS = (b"\x78", b"[")
"""Of zlib's streams, and of a list."""


def is_damos(path: Path) -> bool:
    """Tells by its first byte whether a file may be damo's."""
    with path.open("rb") as file:
        return file.read(1) in _STARTS


def read(path: Path) -> list[Accesses]:
    """Returns the snapshots of all targets in their order; each target's number is its `pid`.

    Raises:
        BadRecording: the file is not as above.
        OSError: it cannot be read.
    """
    try:
        records = json.loads(_text(path))
        targets: dict[Any, Pid] = {}
        found = [
            _accesses(pid, record["intervals"], snapshot)
            for record in records
            for pid in [targets.setdefault(_target(record), Pid(len(targets) + 1))]
            for snapshot in record["snapshots"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError, zlib.error) as error:
        raise BadRecording(
            f"{path}: not as damo writes records: {type(error).__name__}: {error}",
            hint="damo record writes JSON, compressed or not, unless --output_type says otherwise",
        ) from None
    return sorted(found, key=lambda accesses: accesses.at_s)


def _text(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if data.startswith(b"\x78"):
        data = zlib.decompressobj().decompress(data, MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES >> 20} MiB of JSON")
    return data


def _target(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record[key] for key in ("kdamond_idx", "context_idx", "target_id"))


def _accesses(pid: Pid, intervals: Mapping[str, Any], snapshot: Mapping[str, Any]) -> Accesses:
    rows = sorted(
        (
            _number(region["start"]),
            _number(region["end"]),
            _number(region["nr_accesses"]["samples"]),
            _number(region["age"]["aggr_intervals"]),
        )
        for region in snapshot["regions"]
    )
    return Accesses(
        pid=pid,
        at_s=_number(snapshot["end_time"]) / 1e9,
        sample_s=_number(intervals["sample_us"]) / 1e6,
        aggregation_s=_number(intervals["aggr_us"]) / 1e6,
        regions=np.array(rows, REGION),
    )


def _number(value: Any) -> int:
    number = int(str(value).replace(",", ""))
    if number < 0:
        raise ValueError(f"{value} is negative")
    return number
