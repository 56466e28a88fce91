# SPDX-License-Identifier: Apache-2.0
"""Signals sent to the whole process, in one of its own: one that is lost would end pytest."""

import signal
import subprocess
import sys

import pytest

from tierd.kernel.stop import SIGNALS

LOOP = """
import sys, threading, time
import numpy
from tierd.kernel.stop import stop_signals
threading.Thread(target=threading.Event().wait, daemon=True).start()
with stop_signals() as stop:
    print("waiting", stop.asked(0), flush=True)
    for line in sys.stdin:
        print("asked", stop.asked(60), flush=True)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_waited_for_whichever_thread_it_comes_to(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOOP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting False\n"
        process.send_signal(number)
        for _ in range(2):
            process.stdin.write("ask\n")
            process.stdin.flush()
            assert process.stdout.readline() == "asked True\n"
        process.send_signal(number)
        process.stdin.close()
        assert process.wait(60) == 0


ENDING = """
import os, signal
from tierd.kernel.stop import stop_signals
with stop_signals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.asked(60)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_afterwards_signals_end_the_process_as_before() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], timeout=60)
    assert done.returncode == -signal.SIGTERM
