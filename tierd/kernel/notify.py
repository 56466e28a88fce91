# SPDX-License-Identifier: Apache-2.0
"""What systemd is told of a service (sdnotify(3))."""

import logging
import os
import socket

log = logging.getLogger("tierd")

NOTIFY_S = 1.0


def notify(state: str) -> None:
    """Tells systemd, where it started us with Type=notify (sdnotify(3)).

    One that doesn't take what it is told is not waited for: placing pages goes on without it.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.settimeout(NOTIFY_S)
        try:
            channel.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
            channel.send(state.encode())
        except OSError as error:
            log.debug("systemd was not told %s: %s", state, error)
