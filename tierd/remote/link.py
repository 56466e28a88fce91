# SPDX-License-Identifier: Apache-2.0
"""A borrower's hold of one donor: the lease, and the copies that go by it.

What goes wrong ends it for good: a donor that was lost comes back as a new link, and empty.
"""

import socket
import ssl
import threading
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from tierd.errors import Damaged, NoRoom, TierdError, TierFailed
from tierd.kernel.nixl import Reached
from tierd.remote.wire import BEAT_S, LEAVES, SILENCE_S, Ask, Keys, Refusal, receive_lease, send

STAGED_BYTES = 4 << 20
"""Are copied at once, at most, unless a single block is larger."""

PORT = 7430


def split_address(address: str, default: int = PORT) -> tuple[str, int]:
    """Splits host:port, [host]:port, or a host alone. To listen, port 0 is any that is free.

    Raises:
        TierdError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(default)
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise TierdError(f"{address!r} is no host:port", hint=f"such as host-a:{default}")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Spells what split_address() splits."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Link:
    """Slots that a donor lends.

    Args:
        address: of the donor, host:port. Its certificate has to be of that host.
        keys: one's own, and whose donors are believed.
        block_bytes: of a slot.
        slots: how many are wanted; it may have fewer.
        deadline_s: for each batch of blocks.

    Raises:
        TierFailed: it cannot be reached, or does not keep to what is agreed. So does each call.
        NoRoom: it lends nothing.
        TierdError: the address or a key is not one, or there is no NIXL.
    """

    def __init__(
        self, address: str, keys: Keys, block_bytes: int, slots: int, deadline_s: float
    ) -> None:
        self.address = address
        self.failure: str | None = None
        self.leaves = False
        """Whether the donor asks to be left."""
        self._deadline_s = deadline_s
        self._channel = _connect(address, keys)
        try:
            ask = Ask(block_bytes=block_bytes, slots=slots)
            send(self._channel, ask)
            lease = receive_lease(self._channel, ask)
            if isinstance(lease, Refusal):
                raise NoRoom(f"donor {address}: {lease.why}")
            self.donor, self.slots = lease.donor, lease.slots
            staged = min(slots, max(1, STAGED_BYTES // block_bytes))
            self._reached = Reached(lease.ticket, lease.address, lease.slots, block_bytes, staged)
        except (OSError, Damaged) as error:
            self._channel.close()
            raise TierFailed(f"donor {address}: {error}") from error
        except TierdError:
            self._channel.close()
            raise
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name=f"donor {address}")
        self._beating.start()

    def write(self, slots: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        self._try(self._reached.write, slots, data)

    def read(self, slots: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        self._try(self._reached.read, slots, into)

    def end(self) -> None:
        """Gives the slots back."""
        self._fail("given back")
        self._over.set()
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._beating.join()
        self._channel.close()
        self._reached.end()

    def _try(self, call: object, *arguments: object) -> None:
        if self.failure is not None:
            raise TierFailed(f"donor {self.address}: {self.failure}")
        try:
            call(*arguments, self._deadline_s)  # type: ignore[operator]
        except TierFailed as error:
            self._fail(str(error))
            raise TierFailed(f"donor {self.address}: {error}") from error

    def _beat(self) -> None:
        """Is a thread: says that the lease is in use, and hears whether it still is one."""
        try:
            while not self._over.is_set():
                self._channel.sendall(b".")
                answer = self._channel.recv(1)
                if not answer:
                    raise ConnectionResetError("it has hung up")
                self.leaves = answer == LEAVES
                self._over.wait(BEAT_S)
        except (OSError, ValueError) as error:
            self._fail(str(error) or type(error).__name__)

    def _fail(self, why: str) -> None:
        if self.failure is None:
            self.failure = why


def _connect(address: str, keys: Keys) -> ssl.SSLSocket:
    host, port = split_address(address)
    context = keys.context(is_donor=False)
    try:
        plain = socket.create_connection((host, port), SILENCE_S)
    except OSError as error:
        raise TierFailed(f"donor {address}: {error}") from error
    try:
        plain.settimeout(SILENCE_S)
        return context.wrap_socket(plain, server_hostname=host)
    except OSError as error:
        plain.close()
        raise TierFailed(f"donor {address}: {error}") from error
