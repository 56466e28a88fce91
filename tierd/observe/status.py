# SPDX-License-Identifier: Apache-2.0
"""The daemon's account of itself, as a file that anybody can read at any moment.

The daemon replaces /run/tierd/status.json after each round, so that an answer costs no more than
reading a file and comes at once, while a migration runs or memory is short too. It looks like
this, sizes in bytes::

    {"pid": 812, "mode": "place", "rounds": 42, "round_ms": 3.1,
     "tiers": [{"rank": 0, "name": "dram", "kind": "dram", "nodes": [0], "capacity": 1055391744,
                "free": 601882624, "headroom": 21107834, "backing": ["dram"]}, ...],
     "targets": [{"pid": 640, "command": "hotset", "resident": {"dram": 8388608, "cxl": 58720256},
                  "hot": {"dram": 8388608, "cxl": 0}, "pieces": 14}, ...],
     "moved": [{"from": "cxl", "to": "dram", "pages": 2048}, ...],
     "refused": {"busy": 3}, "kept": {"moved or refused lately": 4096},
     "sampler": {"way": "tracepoint", "lost": 0}, "page_cost_ns": 3120.0, "notes": []}
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierd.errors import TierdError

NAME = "status.json"
LARGEST_BYTES = 16 << 20
MOST_PID = 1 << 22  # PID_MAX_LIMIT, include/linux/threads.h


def publish(runtime_dir: Path, status: Mapping[str, Any]) -> None:
    """Replaces the status file in one step."""
    fresh = runtime_dir / f".{NAME}.new"
    fresh.write_text(json.dumps(status, separators=(",", ":")))
    fresh.chmod(0o644)
    fresh.replace(runtime_dir / NAME)


def withdraw(runtime_dir: Path) -> None:
    """Removes the status file: nobody runs any more."""
    for name in (NAME, f".{NAME}.new"):
        with contextlib.suppress(FileNotFoundError):
            (runtime_dir / name).unlink()


def read(runtime_dir: Path) -> dict[str, Any]:
    """Returns what the running daemon published last.

    Raises:
        TierdError: no daemon runs, or the file is not what a daemon of ours writes.
    """
    path = runtime_dir / NAME
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_BYTES)
        status = json.loads(content)
        pid = int(status["pid"])
        if not 0 < pid <= MOST_PID:
            raise ValueError(f"there can be no process {pid}")
    except FileNotFoundError:
        raise _not_running(runtime_dir) from None
    except OSError as error:
        raise TierdError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TierdError(f"{path} is not a status of tierd: {error}") from error
    if not _is_alive(pid):
        raise _not_running(runtime_dir, gone=pid)
    return dict(status)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _not_running(runtime_dir: Path, gone: int | None = None) -> TierdError:
    left = "" if gone is None else f" (process {gone} has left its status behind)"
    return TierdError(
        f"no tierd is running on {runtime_dir}{left}",
        hint="start it with: systemctl start tierd, or in the foreground: tierd run",
    )
