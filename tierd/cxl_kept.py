# SPDX-License-Identifier: Apache-2.0
"""What the daemon keeps of CXL devices' errors over a restart, in its state folder.

`cxl_errors.json`, replaced in one step when it changes::

    {"boot": "6b2c...", "fenced": {"1": "mem0"}, "recent": {"mem0": [812.4, 910.0]},
     "places": [{"kind": "poison", "severity": "uncorrected", "device": "mem0",
                 "region": "region0", "start": 28185722880, "dpa": 0, "size_bytes": 64}]}

It is of one boot: after another one a device may have another name, another node and addresses, and
its poison list tells of the places.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tierd.kernel.cxl_events import CxlEvent, Kind, Severity
from tierd.model import NodeId
from tierd.observe.events import event as log_event

log = logging.getLogger("tierd")

NAME = "cxl_errors.json"
MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The fenced nodes with their devices, when devices lost data (s), and where.

    The times are of CLOCK_MONOTONIC.
    """

    fenced: Mapping[NodeId, str] = field(default_factory=dict)
    recent: Mapping[str, Sequence[float]] = field(default_factory=dict)
    places: Sequence[CxlEvent] = ()


def load(folder: Path, boot: str) -> Kept:
    """Returns what was kept in this boot; nothing where it cannot be read, which is told."""
    path = folder / NAME
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_BYTES))
        if found["boot"] != boot:
            return Kept()
        return Kept(
            fenced={NodeId(int(node)): str(device) for node, device in found["fenced"].items()},
            recent={name: [float(at) for at in times] for name, times in found["recent"].items()},
            places=[_place(**place) for place in found["places"]],
        )
    except FileNotFoundError:
        return Kept()
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        told = "%s cannot be read (%r): earlier errors of CXL devices are forgotten"
        log.warning(told, path, error, extra=log_event("cxl.forgotten"))
        return Kept()


def save(folder: Path, boot: str, kept: Kept) -> None:
    """Replaces what was kept.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    document = {
        "boot": boot,
        "fenced": kept.fenced,
        "recent": {name: [*times] for name, times in kept.recent.items()},
        "places": [asdict(place) for place in kept.places],
    }
    fresh = folder / f".{NAME}.new"
    with fresh.open("w") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / NAME)


def _place(
    *, kind: str, severity: str, device: str, dpa: int, **where: int | str | None
) -> CxlEvent:
    region, start, size_bytes = (where[name] for name in ("region", "start", "size_bytes"))
    return CxlEvent(
        kind=Kind(kind),
        severity=Severity(severity),
        device=str(device),
        region=None if region is None else str(region),
        start=None if start is None else int(start),
        dpa=int(dpa),
        size_bytes=int(size_bytes or 0),
    )
