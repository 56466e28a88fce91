# SPDX-License-Identifier: Apache-2.0
"""The modules behind the scripts are programs: they answer --help."""

import os
import subprocess
import sys

import pytest
from guests.guest import REPOSITORY


@pytest.mark.parametrize("module", ["guests.demo", "guests.cli", "benches"])
def test_help(module: str) -> None:
    paths = [str(REPOSITORY / "tests/vm"), str(REPOSITORY / "scripts")]
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: ")
