# SPDX-License-Identifier: Apache-2.0
"""Asks a running daemon, over one of its sockets."""

import json
import socket
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from tierd.errors import NotFound, TierdError

TIMEOUT_S = 30.0
ANSWER_BYTES = 64 << 20


class Client:
    """A daemon behind a socket.

    Args:
        path: of the socket.
        name: of the daemon, and of its service.
    """

    def __init__(self, path: Path, name: str = "tierd") -> None:
        self._path, self._name = path, name

    def get(self, path: str) -> Any:
        """Asks for a path."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Sends a body as JSON, and returns what the answer's is.

        Raises:
            TierdError: no daemon is there, or we may not ask it, or it refuses; as it says.
        """
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection = _UnixConnection(self._path)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read(ANSWER_BYTES)
            told: Any = json.loads(text)
        except (FileNotFoundError, ConnectionRefusedError):
            raise TierdError(
                f"no {self._name} is running on {self._path.parent}",
                hint=f"start it with: systemctl start {self._name}, or in the foreground: "
                f"{self._name} run",
            ) from None
        except PermissionError:
            raise TierdError(
                f"{self._path}: permission denied",
                hint="as root (sudo), or as a member of the group tierd",
            ) from None
        except (TimeoutError, HTTPException, ValueError) as error:
            raise TierdError(f"{self._path}: no answer of {self._name}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            kind = NotFound if answer.status == 404 else TierdError
            raise kind(told.get("error", answer.reason), hint=told.get("hint"))
        return told


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))
