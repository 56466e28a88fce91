# SPDX-License-Identifier: Apache-2.0
"""Records what a session tells of a process: record.py FILE PID SECONDS.

The file is an array of dtype RECORDED in NumPy's own format.
"""

import select
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import REGION, Accesses
from tierd.config import DamonConfig
from tierd.journal import Journal
from tierd.model import Pid
from tierd.sample.session import Session

RECORDED = np.dtype([("at_s", "f8"), ("sample_us", "u4"), ("aggregation_us", "u4"), *REGION.descr])
"""A region of a snapshot. Rows of one `at_s`, CLOCK_MONOTONIC, are a complete snapshot."""


def rows(accesses: Accesses) -> NDArray[np.void]:
    found = np.empty(len(accesses.regions), RECORDED)
    found["at_s"] = accesses.at_s
    found["sample_us"] = round(accesses.sample_s * 1e6)
    found["aggregation_us"] = round(accesses.aggregation_s * 1e6)
    for name in REGION.names or ():
        found[name] = accesses.regions[name]
    return found


def record(session: Session, seconds: float) -> NDArray[np.void]:
    taken: list[Accesses] = []
    poll = select.poll()
    for fileno in session.filenos():
        poll.register(fileno, select.POLLIN)
    while not taken or taken[-1].at_s - taken[0].at_s < seconds:
        poll.poll()
        taken += session.poll()
    return np.concatenate([rows(accesses) for accesses in taken])


def main() -> None:
    file, pid, seconds = sys.argv[1:]
    config = DamonConfig(take_over=True, cpu_percent=100.0)
    with (
        tempfile.TemporaryDirectory() as state,
        Journal(Path(state)) as journal,
        Session(config, journal) as session,
    ):
        session.watch(Pid(int(pid)))
        np.save(file, record(session, float(seconds)))


main()
