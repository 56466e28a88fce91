# SPDX-License-Identifier: Apache-2.0
"""Records DAMON's snapshots of a steady hot set in a guest, for tests/data/hotset-records.npy.xz.

.venv/bin/python tests/vm/record_hotset.py
"""

import lzma

from guests.boot import boot
from guests.guest import REPOSITORY
from guests.kernels import Kernel
from guests.topology import slow_node
from guests.workloads import hotset

RECORDS = REPOSITORY / "tests/data/hotset-records.npy.xz"
IN_GUEST = "/tmp/records.npy"
SECONDS, SETTLE_S = 70, 10
OPTIONS = ("--mib", "256", "--node", "1", "--hot-mib", "64", "--share", "90")


def main() -> None:
    with boot(slow_node(), Kernel.LTS) as guest, hotset(guest, *OPTIONS) as load:
        list(load.samples(SETTLE_S))
        program = ["python", "tests/vm/sampling/record.py", IN_GUEST, str(load.pid), str(SECONDS)]
        guest.run(program, timeout=600)
        RECORDS.write_bytes(lzma.compress(guest.read(IN_GUEST), preset=9))


if __name__ == "__main__":
    main()
