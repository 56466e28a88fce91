# SPDX-License-Identifier: Apache-2.0
"""The units, as systemd's own tools read it."""

import shutil
import subprocess
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).parents[2] / "systemd"
MOST_EXPOSURE = {"tierd.service": 30, "tierd-cxl@.service": 10, "tierd-donor.service": 20}
"""Of 100."""


@pytest.fixture(autouse=True)
def _analyze() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing: apt-get install systemd")


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", MOST_EXPOSURE)
def test_little_is_exposed(name: str) -> None:
    limit = f"--threshold={MOST_EXPOSURE[name]}"
    done = analyze("security", "--offline=true", limit, SYSTEMD / name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_knows_every_key(tmp_path: Path) -> None:
    for name in (*MOST_EXPOSURE, "tierd.slice"):
        unit = (SYSTEMD / name).read_text()
        # What is not installed here; manual pages neither.
        unit = unit.replace("/usr/local/lib/tierd/bin/", "/bin/true ")
        (tmp_path / name).write_text(unit.replace("Documentation=", "# "))
        done = analyze("verify", "--recursive-errors=no", tmp_path / name)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
