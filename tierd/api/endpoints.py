# SPDX-License-Identifier: Apache-2.0
"""Which operations of a daemon are told where."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tierd.api.operation import C, Operation, V
from tierd.api.server import Endpoint, serving, unix_listener
from tierd.api.sockets import CONTROL, GROUP, MONITOR


@contextmanager
def serving_api(
    runtime_dir: Path,
    app: Callable[[Sequence[Operation[V, C]]], Any],
    operations: Sequence[Operation[V, C]],
    metrics: socket.socket | None = None,
) -> Iterator[None]:
    """Serves a daemon's API inside the block.

    Args:
        runtime_dir: where its Unix sockets are: one of all, and one of what is for anybody.
        app: makes the application of some operations.
        operations: all that there are.
        metrics: listens to who collects metrics alone.

    Raises:
        Conflict: another daemon has its sockets there.
    """
    watch = [operation for operation in operations if operation.is_for_monitoring]
    with ExitStack() as stack:
        control = stack.enter_context(unix_listener(runtime_dir / CONTROL, 0o660, GROUP))
        monitor = stack.enter_context(unix_listener(runtime_dir / MONITOR, 0o666))
        endpoints = [
            Endpoint(listener=control, app=app(operations)),
            Endpoint(listener=monitor, app=app(watch)),
        ]
        if metrics is not None:
            told = [operation for operation in watch if operation.path == "/metrics"]
            endpoints.append(Endpoint(listener=metrics, app=app(told)))
        stack.enter_context(serving(endpoints))
        yield
