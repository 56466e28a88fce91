# SPDX-License-Identifier: Apache-2.0
"""Subscribes to the process connector for another process, which runs it as a program.

pyroute2 takes half a second to import, and 14 MiB, which a daemon would hold for good to send one
message. The socket goes to who asked by a Unix socket, the first argument its descriptor, beside a
zero; or, where that has failed, the errno.
"""

import socket
import sys

from pyroute2.netlink.connector.cn_proc import ProcEventSocket


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as asker:
        try:
            events = ProcEventSocket()
            events.bind()
            events.control(listen=True)
        except OSError as error:
            asker.sendall(b"%d" % (error.errno or 0))
        else:
            socket.send_fds(asker, [b"0"], [events.fileno()])


if __name__ == "__main__":
    main()
