# SPDX-License-Identifier: Apache-2.0
"""Copies between two memories by RDMA of rxe0, with pyverbs; it knows nothing of NIXL and UCX.

oracle.py MEMORY MIRROR BYTES, both open files; lines of stdin are carried out and answered:

read AT SIZE    an RDMA READ of the memory, into the mirror
write AT SIZE   an RDMA WRITE to the memory, of what the mirror has there

Debian's pyverbs is of the system's Python, so this is run by that.
"""

import ctypes
import mmap
import sys
from typing import Any

from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_MTU_1024,
    IBV_QPT_RC,
    IBV_WC_SUCCESS,
    IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE,
)
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

DEVICE, PORT, GID = "rxe0", 1, 1
OPCODES = {"read": IBV_WR_RDMA_READ, "write": IBV_WR_RDMA_WRITE}
ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE


def register(domain: PD, mapped: mmap.mmap) -> MR:
    """Registers a file that is mapped, for both ways."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    return MR(domain, len(mapped), ACCESS, address=address)


def connect(context: Context, one: QP, other: QP) -> None:
    """Brings a queue pair to where it sends to another one."""
    route = GlobalRoute(dgid=context.query_gid(PORT, GID), sgid_index=GID)
    attributes = QPAttr(port_num=PORT)
    attributes.dest_qp_num = other.qp_num
    attributes.path_mtu = IBV_MTU_1024
    attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
    attributes.qp_access_flags = ACCESS
    attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
    attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 18, 7, 7
    one.to_rts(attributes)


def main(memory_file: int, mirror_file: int, size: int) -> None:
    context = Context(name=DEVICE)
    domain, queue = PD(context), CQ(context, 16)
    mapped = [mmap.mmap(file, size) for file in (memory_file, mirror_file)]
    memory, mirror = (register(domain, each) for each in mapped)
    wanted = QPInitAttr(qp_type=IBV_QPT_RC, scq=queue, rcq=queue, cap=QPCap())
    here, there = QP(domain, wanted), QP(domain, wanted)
    connect(context, here, there)
    connect(context, there, here)
    for line in sys.stdin:
        way, at, length = line.split()
        part = SGE(mirror.buf + int(at), int(length), mirror.lkey)
        request = SendWR(num_sge=1, sg=[part], opcode=OPCODES[way])
        request.set_wr_rdma(memory.rkey, memory.buf + int(at))
        here.post_send(request)
        done: list[Any] = []
        while not done:
            _, done = queue.poll()
        [completion] = done
        if completion.status != IBV_WC_SUCCESS:
            raise SystemExit(f"{line.strip()}: {completion}")
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
