# SPDX-License-Identifier: Apache-2.0
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tierd.cli.control import main
from tierd.observe import damo
from tierd.observe.moments import load
from tierd.observe.recording import BadRecording
from tierd.replay import configured, replay

RECORDS = Path(__file__).parents[1] / "data/damo-records.data"
MIB = 1 << 20


def test_each_snapshot_is_read() -> None:
    found = damo.read(RECORDS)
    assert len(found) == 39
    assert {(a.pid, a.sample_s, a.aggregation_s) for a in found} == {(1, 0.02, 0.4)}
    assert all(np.diff([accesses.at_s for accesses in found]) > 0)
    hot = [hot_bytes(accesses.regions) for accesses in found]
    assert np.median(hot) == pytest.approx(16 * MIB, rel=0.1)


def hot_bytes(regions: NDArray[np.void]) -> int:
    hot = regions[regions["nr_accesses"] >= 15]
    return int((hot["end"] - hot["start"]).sum())


def test_its_hot_set_is_found(tmp_path: Path) -> None:
    recording = load(RECORDS)
    config = configured(recording)
    ratios = [replay(recording, config, fast_bytes=size * MIB).hit_ratio for size in (8, 64, 512)]
    assert ratios[0] < ratios[1] < ratios[2]
    assert ratios[1] > 0.8


def test_it_has_to_be_told_of_fast_memory() -> None:
    result = CliRunner().invoke(main, ["replay", str(RECORDS)], prog_name="tierctl")
    assert result.exit_code == 1
    assert "tierctl: hint: suppose some with --fast SIZE" in result.output
    assert CliRunner().invoke(main, ["size", str(RECORDS)]).exit_code == 0


def a_record(**changes: Any) -> list[dict[str, Any]]:
    region = {
        "start": "4,096",
        "end": "8,192",
        "nr_accesses": {"samples": 3, "percent": None},
        "age": {"usec": None, "aggr_intervals": "2"},
    }
    snapshot = {"start_time": "0", "end_time": "1000000000", "regions": [region | changes]}
    intervals = {"sample_us": "5000", "aggr_us": "100000"}
    about = {"kdamond_idx": 0, "context_idx": 0, "target_id": None, "intervals": intervals}
    return [about | {"snapshots": [snapshot]}]


def test_plain_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "damon.data"
    path.write_text(json.dumps(a_record()))
    (found,) = damo.read(path)
    assert found.regions.tolist() == [(4096, 8192, 3, 2)]
    assert found.at_s == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[", "not as damo writes records"),
        (b"x" * 100, "not as damo writes records"),
        (b"[" * 100_000, "not as damo writes records"),
        (b"[{}]", "KeyError"),
        (b"[]", "holds no snapshot"),
        (json.dumps(a_record(end="four")).encode(), "ValueError"),
        (json.dumps(a_record(start=-1)).encode(), "-1 is negative"),
        (json.dumps(a_record(end=str(1 << 65))).encode(), "OverflowError"),
        (json.dumps(a_record(end="4,096")).encode(), "lacks ranges in order"),
    ],
)
def test_what_is_not_damos_is_told(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "damon.data"
    path.write_bytes(content)
    with pytest.raises(BadRecording, match=message):
        load(path)


def test_what_grows_too_large_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damo, "MOST_BYTES", 1 << 20)
    path = tmp_path / "damon.data"
    path.write_bytes(zlib.compress(bytes((1 << 20) + 2)))
    with pytest.raises(BadRecording, match="more than 1 MiB"):
        load(path)
