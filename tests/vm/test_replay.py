# SPDX-License-Identifier: Apache-2.0
"""What a replay predicts, against what the program measured that was recorded."""

from pathlib import Path

import pytest
from guests.guest import Guest
from guests.recordings import mean_hit_ratio, record
from guests.topology import slow_node

from tierd.observe.moments import load
from tierd.replay import configured, replay

SECONDS = 90


@pytest.mark.guest(slow_node())
def test_a_replay_predicts_what_was_measured(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "window.tierd"
    measured = record(guest, path, SECONDS)
    recording = load(path)
    assert recording.seconds > SECONDS / 2
    truth = mean_hit_ratio(measured, recording.begun_s, recording.ended_s)
    assert 0.5 < truth < 1, "there was something to predict"
    predicted = replay(recording, configured(recording))
    assert predicted.hit_ratio == pytest.approx(truth, abs=0.03)
