# SPDX-License-Identifier: Apache-2.0
"""./scripts/demo --remote, briefly."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from sweeps.donors import BY_TCP
from sweeps.remote import main


def test_nothing_is_lost_with_a_donor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BY_TCP.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "demo.json"
    done = CliRunner().invoke(main, ["--seconds", "8", "--json", str(file)])
    assert done.exit_code == 0, done.output
    told = json.loads(file.read_text())
    assert told["lost"] == 0
    assert told["copied_again_mib"] > 0
    assert "is killed" in done.output
    assert "is on two donors again" in done.output
