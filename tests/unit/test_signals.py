# SPDX-License-Identifier: Apache-2.0
"""Signals sent to the whole process, in one of its own: one that is lost would end pytest."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tierd.kernel.signals import STOP

LOOP = """
import sys, threading, time
import numpy
from tierd.kernel.signals import CALL, RELOAD, caught_signals
def answer(word):
    return lambda: print(word, flush=True)
answers = {RELOAD: answer("reload"), CALL: answer("call")}
threading.Thread(target=threading.Event().wait, daemon=True).start()
with caught_signals() as signals:
    print("waiting", signals.stop_asked(0, answers), flush=True)
    for line in sys.stdin:
        if line == "call\\n":
            threading.Thread(target=signals.call).start()
            while not signals.are_waiting():
                time.sleep(0.01)
            continue
        print("asked", signals.stop_asked(float(line), answers), flush=True)
"""


@contextmanager
def loop() -> Iterator[
    tuple[subprocess.Popen[str], Callable[[float | str], None], Callable[[], str]]
]:
    """LOOP in a process, what has it wait for so many seconds or call, and what reads a line of it.

    It ends as it should once its input is closed.
    """
    with subprocess.Popen(
        [sys.executable, "-c", LOOP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        entry = process.stdin

        def ask(words: float | str) -> None:
            entry.write(f"{words}\n")
            entry.flush()

        assert process.stdout.readline() == "waiting False\n"
        yield process, ask, process.stdout.readline
        entry.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", sorted(STOP))
def test_a_signal_is_waited_for_whichever_thread_it_comes_to(number: signal.Signals) -> None:
    with loop() as (process, ask, told):
        process.send_signal(number)
        for _ in range(2):
            ask(60)
            assert told() == "asked True\n"
        process.send_signal(number)


def test_a_reload_is_asked_for_and_the_wait_goes_on() -> None:
    with loop() as (process, ask, told):
        process.send_signal(signal.SIGHUP)
        ask(0.2)
        assert [told() for _ in range(2)] == ["reload\n", "asked False\n"]
        ask(60)
        process.send_signal(signal.SIGHUP)
        assert told() == "reload\n"
        process.send_signal(signal.SIGTERM)
        assert told() == "asked True\n"


def test_another_thread_ends_the_wait() -> None:
    with loop() as (_, ask, told):
        ask("call")
        ask(0.2)
        assert [told() for _ in range(2)] == ["call\n", "asked False\n"]


ENDING = """
import os, signal
from tierd.kernel.signals import caught_signals
with caught_signals() as signals:
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.stop_asked(60, {})
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_afterwards_signals_end_the_process_as_before() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], timeout=60)
    assert done.returncode == -signal.SIGTERM
