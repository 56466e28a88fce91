# SPDX-License-Identifier: Apache-2.0
import json
import mmap
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_char
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.unit import trees
from tests.unit.conftest import CXL_ERRORS
from tests.unit.test_arenas import FakeLease
from tierd.account import account
from tierd.arenas import Arenas
from tierd.bulk import NO_LOADS, REGION, Accesses, Plan, Report
from tierd.cli.control import main
from tierd.config import Config, Place, TenantConfig
from tierd.config.show import as_dict
from tierd.daemon import Daemon
from tierd.discover.topology import discover
from tierd.kernel.process import read_process
from tierd.machine import ThisMachine
from tierd.model import PAGE_BYTES, Kept, NodeId, NodeRoom, Outcome, Pid
from tierd.observe import status
from tierd.observe.flows import QUIET
from tierd.sample import residence
from tierd.sample.tuning import Tuning

DOCUMENT = (Path(__file__).parents[2] / "docs/status.md").read_text()
OWN = Pid(os.getpid())
BUFFER_BYTES = 4 << 20
ROUNDS = 10


@contextmanager
def a_buffer() -> Iterator[int]:
    """The address of memory of our own."""
    with mmap.mmap(-1, BUFFER_BYTES) as buffer:
        first = c_char.from_buffer(buffer)
        yield addressof(first)
        del first


class OneHotRange:
    """A sampler that sees one range accessed in each interval."""

    way = "tracepoint"
    losses = 0
    zoomed_pages = 0
    sampling = None
    loads = NO_LOADS
    is_calm = can_look = can_zoom = False

    def __init__(self, start: int) -> None:
        self.regions = np.array([(start, start + BUFFER_BYTES, 20, 0)], REGION)

    @property
    def tuning(self) -> Mapping[Pid, Tuning]:
        as_configured = Tuning(
            sample_us=20_000, aggregation_us=400_000, max_regions=1000, thrift=1, cpu_percent=None
        )
        return {OWN: as_configured}

    def poll(self) -> list[Accesses]:
        seen = Accesses(
            pid=OWN, at_s=time.monotonic(), sample_s=0.02, aggregation_s=0.4, regions=self.regions
        )
        return [seen]

    def watch(self, pid: Pid) -> None:
        assert pid == OWN

    def unwatch(self, pid: Pid) -> None:
        raise AssertionError(pid)

    def zoom(self, pid: Pid, start: int, end: int, *, per_page_s: float) -> bool:
        raise AssertionError(pid)

    def gone(self) -> list[Pid]:
        return []

    def filenos(self) -> Sequence[int]:
        return []

    def close(self) -> None:
        raise AssertionError


class HalfMover:
    """Moves half of what it is told to; the rest is busy."""

    def run(self, plan: Plan, *, deadline_s: float) -> Report:
        pages = np.zeros((len(plan.moves), len(Outcome)), np.int64)
        pages[:, [Outcome.MOVED, Outcome.BUSY]] = (plan.moves["bytes"] // PAGE_BYTES // 2)[:, None]
        return Report(plan=plan, pages=pages, reached=plan.moves["end"].copy(), busy_ns=1000)


def place_on_cxl(pid: Pid, pieces: NDArray[np.void], *_: object, **__: object) -> None:
    pieces["resident"][:, 1] = 1
    pieces["probed_s"] = 0


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `tierctl status --json` prints of a daemon that has made some rounds."""
    monkeypatch.setattr(residence, "probe", place_on_cxl)
    found = read_process(OWN)
    assert found is not None
    lease = FakeLease(8, 4)
    with a_buffer() as start:
        daemon = Daemon(
            Config(tenants=(TenantConfig(cgroup="/db", place=Place(file="f", line=1, key="")),)),
            topology=discover((), trees.unpack("cxl-7.2", tmp_path / "root")),
            sampler=OneHotRange(start),
            mover=HalfMover(),
            machine=ThisMachine(
                finder=lambda: [found],
                free=lambda: {NodeId(0): NodeRoom(1 << 30), NodeId(1): NodeRoom(1 << 29)},
            ),
            tell=lambda daemon, rooms: status.publish(
                tmp_path, {**account(daemon, rooms), **of_the_service()}
            ),
        )
        daemon.arenas = Arenas(lambda: [lease])
        up = {"action": "migrate_hot", "pages": 5, "regions": 2}
        daemon.schemes = [up | {"tried_bytes": 8, "over_quota": 0}]
        for _ in range(ROUNDS):
            daemon.round()
    path = tmp_path / "tierd.toml"
    path.write_text(f"[daemon]\nruntime_dir = '{tmp_path}'\n")
    result = CliRunner().invoke(main, ["status", "--json", "--config", str(path)])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.output)
    return document


def of_the_service() -> dict[str, Any]:
    """What the service adds to the daemon's account."""
    drain = {"node": 1, "done": False, "moved_pages": 7, "in_use": 4096, "left": {"busy": 1}}
    passes = {"passes": 1, "processes": 9, "processes_left": 3}
    return {"pid": OWN, "config": as_dict(Config()), "set": {}, "drains": [drain | passes]} | {
        "cxl": CXL_ERRORS
    }


_BY_NAME = (
    *(".resident", ".hot", ".rate", ".left", ".share", ".guaranteed", ".maximum"),
    *("far_used_mbps", "far_limit_mbps", "far_maximum_mbps"),
    *("refused", "kept", "config", "set"),
)


def keys(value: Any, above: str = "") -> set[str]:
    """The keys as docs/status.md spells them: those named by a tier or a reason are not keys."""
    if isinstance(value, list):
        return set().union(*(keys(item, f"{above}[]") for item in value))
    if not isinstance(value, dict) or above.endswith(_BY_NAME):
        return set()
    inside = {f"{above}.{key}".lstrip("."): item for key, item in value.items()}
    return set(inside).union(*(keys(item, key) for key, item in inside.items()))


def test_json_has_the_documented_keys_and_no_others(told: dict[str, Any]) -> None:
    tuning = told["sampler"]["tuning"]
    assert list(tuning) == [str(OWN)]
    told["sampler"]["tuning"] = {"PID": tuning[str(OWN)]}
    documented = re.findall(r"^\| `([\w.\[\]]+)` \|", DOCUMENT.split("\n## Why")[0], re.MULTILINE)
    assert keys(told) - {"sampler.tuning.PID"} == set(documented)


def test_what_was_moved_and_refused_is_told_by_tier_and_reason(told: dict[str, Any]) -> None:
    (flow,) = told["moved"]
    assert (flow["from"], flow["to"]) == ("cxl", "dram")
    assert told["refused"] == {"busy": flow["pages"]}
    (target,) = told["targets"]
    assert set(target["resident"]) == set(target["hot"]) == {"dram", "cxl"}
    assert target["hot"]["cxl"] == BUFFER_BYTES


def test_every_reason_is_documented() -> None:
    refused, kept = (
        set(re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE))
        for part in DOCUMENT.split("\n## Why")[1:]
    )
    assert refused == {outcome.label for outcome in Outcome if outcome not in QUIET}
    assert kept == {str(why) for why in Kept}
