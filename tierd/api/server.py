# SPDX-License-Identifier: Apache-2.0
"""The sockets of the API, and the threads that serve them.

    tierd.sock    0660 root:tierd   everything
    monitor.sock  0666              what neither changes anything nor tells of one process's memory

waitress reads requests and writes answers without blocking, so that a client that sends slowly or
never reads costs a connection and no thread. Each socket has connections and threads of its own:
who fills the read-only one doesn't keep an operator out.
"""

import grp
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waitress import wasyncore
from waitress.server import create_server

from tierd.errors import Conflict, TierdError

log = logging.getLogger("tierd")

_NETWORK = (
    "the service is kept from the network; to open the machine's own address to it, put [Service], "
    "RestrictAddressFamilies=AF_INET AF_INET6 and IPAddressAllow=localhost into: "
    "systemctl edit tierd"
)


THREADS = 2
MOST_CONNECTIONS = 50
STOP_S = 5
HEADER_BYTES, BODY_BYTES = 16 << 10, 64 << 10
IDLE_S, LOOK_S = 30, 10
"""A connection on which nothing comes or goes for so long is closed; it is looked for now and then.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A listening socket and the WSGI application behind it."""

    listener: socket.socket
    app: Any


@contextmanager
def unix_listener(
    path: Path, mode: int, group: str | None = None, *, kind: int = socket.SOCK_STREAM
) -> Iterator[socket.socket]:
    """Listens on a Unix socket inside the block; one that a crash has left there is replaced.

    Args:
        path: of the socket.
        mode: its permissions.
        group: who owns it besides root; root alone may use it where there is no such group.
        kind: of socket.

    Raises:
        Conflict: another daemon listens there.
    """
    _remove_stale(path, kind)
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        try:
            _hand_to(path, mode, group)
            listener.listen(MOST_CONNECTIONS)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _remove_stale(path: Path, kind: int) -> None:
    with socket.socket(socket.AF_UNIX, kind) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink()
            return
    raise Conflict(f"another daemon listens on {path}", hint="systemctl stop tierd")


def _hand_to(path: Path, mode: int, group: str | None) -> None:
    if group is not None:
        try:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
        except KeyError:
            log.info("there is no group %s: %s is for root alone", group, path)
            return
        except PermissionError:
            log.info("not in the group %s: %s is for its owner alone", group, path)
            return
    path.chmod(mode)


def tcp_listener(address: str, port: int) -> socket.socket:
    """Listens on an address of the machine, for metrics alone.

    Raises:
        TierdError: it is not the machine's, or is in use, or the service may not use the network.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise TierdError(
            f"metrics_listen: {address}, port {port}: {error.strerror}", hint=_NETWORK
        ) from error


@contextmanager
def serving(endpoints: Sequence[Endpoint]) -> Iterator[None]:
    """Serves them inside the block, each by a loop of its own."""
    with ExitStack() as stack:
        for endpoint in endpoints:
            stack.enter_context(_serving(endpoint))
        yield


@contextmanager
def _serving(endpoint: Endpoint) -> Iterator[None]:
    connections: dict[int, Any] = {}
    server: Any = create_server(
        endpoint.app,
        map=connections,
        sockets=[endpoint.listener],
        threads=THREADS,
        connection_limit=MOST_CONNECTIONS,
        channel_timeout=IDLE_S,
        cleanup_interval=LOOK_S,
        max_request_header_size=HEADER_BYTES,
        max_request_body_size=BODY_BYTES,
        ident="tierd",
        clear_untrusted_proxy_headers=True,
    )
    options = {"timeout": LOOK_S, "map": connections, "use_poll": True}
    loop = threading.Thread(target=wasyncore.loop, kwargs=options, name="tierd-api", daemon=True)
    loop.start()
    try:
        yield
    finally:
        server.task_dispatcher.shutdown(timeout=STOP_S)
        # The loop ends once it has nothing to watch; only its own thread may take it that.
        server.trigger.pull_trigger(lambda: wasyncore.close_all(connections, True))
        loop.join(STOP_S)
