# SPDX-License-Identifier: Apache-2.0
"""The unit, as systemd's own tools read it."""

import shutil
import subprocess
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).parents[2] / "systemd"
MOST_EXPOSURE = 30  # of 100


@pytest.fixture(autouse=True)
def _analyze() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing: apt-get install systemd")


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_little_is_exposed() -> None:
    limit = f"--threshold={MOST_EXPOSURE}"
    done = analyze("security", "--offline=true", limit, SYSTEMD / "tierd.service")
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_knows_every_key(tmp_path: Path) -> None:
    for name in ("tierd.service", "tierd.slice"):
        unit = (SYSTEMD / name).read_text()
        # What is not installed here; manual pages neither.
        unit = unit.replace("/usr/local/lib/tierd/bin/", "/bin/true ")
        (tmp_path / name).write_text(unit.replace("Documentation=", "# "))
        done = analyze("verify", "--recursive-errors=no", tmp_path / name)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
