# SPDX-License-Identifier: Apache-2.0
"""What commands load before they do anything."""

import subprocess
import sys

import click
import pytest

from tierd.cli.control import main

WITH_ARRAYS = {"cxl", "doctor", "heat", "measure", "replay", "size"}
"""The commands that are about arrays, or stand on modules of which others are."""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", sorted({*main.list_commands(click.Context(main))} - WITH_ARRAYS))
def test_a_command_without_arrays_loads_no_numpy(name: str) -> None:
    found = run(
        "import sys\n"
        "from tierd.cli.control import main\n"
        f"assert main.get_command(None, {name!r})\n"
        "print('numpy' in sys.modules)"
    )
    assert found == "False"


def test_numpy_starts_no_threads() -> None:
    found = run("import os, tierd.cli, numpy; print(len(os.listdir('/proc/self/task')))")
    assert found == "1"
