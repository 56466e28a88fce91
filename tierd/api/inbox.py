# SPDX-License-Identifier: Apache-2.0
"""Work that other threads hand to the daemon's loop, which does it between two rounds."""

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tierd.errors import Busy

T = TypeVar("T")


class Inbox:
    """The loop's side is run(), the others' is call().

    Args:
        wake: ends the loop's wait; called from the other threads.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()

    def call(self, work: Callable[[], T], wait_s: float) -> T:
        """Has the loop do it, and returns what came of it or raises what it raised.

        Raises:
            Busy: the loop did not come to it in time, and now will not.
        """
        done: Future[T] = Future()
        self._waiting.put((work, done))
        self._wake()
        try:
            return done.result(wait_s)
        except FutureTimeout:
            if done.cancel():
                raise Busy(f"the daemon did not come to it within {wait_s:g} s") from None
            return done.result()

    def run(self) -> None:
        """Does what is waiting; what it raises is for who asked."""
        with suppress(Empty):
            while True:
                work, done = self._waiting.get_nowait()
                if not done.set_running_or_notify_cancel():
                    continue
                try:
                    done.set_result(work())
                except Exception as error:  # noqa: BLE001 - it is raised again where it was asked for
                    done.set_exception(error)
