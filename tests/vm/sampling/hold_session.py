# SPDX-License-Identifier: Apache-2.0
"""Watches a process until it is killed: hold_session.py STATE_DIR PID. Says so once it does."""

import signal
import sys
from pathlib import Path

from tierd.config import DamonConfig
from tierd.journal import Journal
from tierd.model import Pid
from tierd.sample.session import Session

with (
    Journal(Path(sys.argv[1])) as journal,
    Session(DamonConfig(take_over=True, cpu_percent=100.0), journal) as session,
):
    session.watch(Pid(int(sys.argv[2])))
    sys.stdout.write("watching\n")
    sys.stdout.flush()
    signal.pause()
