# SPDX-License-Identifier: Apache-2.0
"""What a borrower and a donor say to each other, over TLS in which both show a certificate.

    borrower  Ask: so many slots of so many bytes; or that a lease goes on
    donor     Lease: where they are, and the ticket to reach them; or Refusal: why not
    borrower  a byte, again and again
    donor     a byte for each: LENDS, or LEAVES where it is about to go

Each of the first two is its length, 4 bytes, and a JSON object. A borrower that hangs up ends its
lease. Where nothing is heard any more, the donor keeps it for a while, and the borrower comes back
by another connection and with its name. Blocks do not come this way: they go by NIXL.
"""

import base64
import binascii
import json
import socket
import ssl
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tierd.errors import Damaged, TierdError

VERSION: Final = 1
MOST_BYTES: Final = 64 << 10
SILENCE_S: Final = 5.0
"""After so long without a byte the other one is not there."""

BEAT_S: Final = 1.0
LENDS, LEAVES = b"+", b"-"

_LENGTH = struct.Struct("<I")
_MOST_SLOTS = (1 << 31) - 1
"""NIXL counts them in an int32."""

MOST_KEEP_S: Final = 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`lease` is that which goes on, or empty where a new one is asked for."""

    block_bytes: int
    slots: int
    lease: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Slots, as many as asked for or fewer, from `address` on in the donor's memory.

    `lease` is known to this borrower alone; after `keep_s` seconds of silence it has ended.
    """

    donor: str
    lease: str
    keep_s: int
    address: int
    slots: int
    ticket: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """PEM files: who may sign for others, one's own certificate, and its key."""

    ca: Path
    cert: Path
    key: Path

    def context(self, *, is_donor: bool) -> ssl.SSLContext:
        """Returns what makes a connection of which both ends have shown a certificate.

        Raises:
            TierdError: a file is missing, or is not what it should be.
        """
        purpose = ssl.Purpose.CLIENT_AUTH if is_donor else ssl.Purpose.SERVER_AUTH
        try:
            context = ssl.create_default_context(purpose, cafile=str(self.ca))
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise TierdError(
                f"keys {self.ca}, {self.cert}, {self.key}: {error}",
                hint="docs/remote.md tells how to make them",
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


def send(channel: socket.socket, message: Ask | Lease | Refusal) -> None:
    told = asdict(message)
    if isinstance(message, Lease):
        told["ticket"] = base64.b64encode(message.ticket).decode()
    data = json.dumps({"version": VERSION, **told}).encode()
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive_ask(channel: socket.socket) -> Ask:
    """Waits for what a borrower asks.

    Raises:
        Damaged: it says something else.
        OSError: it is silent, or gone.
    """
    told = _receive(channel)
    return Ask(
        block_bytes=_number(told, "block_bytes", 1 << 40),
        slots=_number(told, "slots", _MOST_SLOTS),
        lease=_text(told, "lease"),
    )


def receive_lease(channel: socket.socket, asked: Ask) -> Lease | Refusal:
    """Waits for a donor's answer. Raises as receive_ask()."""
    told = _receive(channel)
    if "why" in told:
        return Refusal(why=_text(told, "why"))
    try:
        ticket = base64.b64decode(_text(told, "ticket"), validate=True)
    except binascii.Error as error:
        raise Damaged(f"a ticket that is none: {error}") from error
    return Lease(
        donor=_text(told, "donor"),
        lease=_text(told, "lease"),
        keep_s=_number(told, "keep_s", MOST_KEEP_S),
        address=_number(told, "address", (1 << 64) - 1),
        slots=_number(told, "slots", asked.slots),
        ticket=ticket,
    )


def _receive(channel: socket.socket) -> dict[str, Any]:
    [length] = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    if length > MOST_BYTES:
        raise Damaged(f"a message of {length} bytes, of {MOST_BYTES} at most")
    try:
        told = json.loads(_exactly(channel, length))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"a message that is no JSON: {error}") from error
    if not isinstance(told, dict):
        raise Damaged("a message that is no JSON object")
    if told.get("version") != VERSION:
        raise Damaged(
            f"a message of version {str(told.get('version'))[:20]}",
            hint=f"this is version {VERSION}: use the same release at both ends",
        )
    return told


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            raise ConnectionResetError("it has hung up")
        data += part
    return bytes(data)


def _number(told: dict[str, Any], name: str, most: int) -> int:
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise Damaged(f"{name} is {str(value)[:40]}, and not from 1 to {most}")
    return value


def _text(told: dict[str, Any], name: str) -> str:
    value = told.get(name)
    if not isinstance(value, str):
        raise Damaged(f"{name} is no text")
    return "".join(c if c.isprintable() else "?" for c in value)
