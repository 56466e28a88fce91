# SPDX-License-Identifier: Apache-2.0
"""What an arena and the daemon say to each other, over a SOCK_SEQPACKET Unix socket.

    arena   hello: HELLO, the arena's name, and by SCM_RIGHTS the memfd of docs/arena.md
    daemon  "welcome", or why not, and the end
    daemon  commands, again and again: an array of COMMAND, MOST_COMMANDS at most

The arena says nothing else. Its end is that of the connection.
"""

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import Damaged

MAGIC: Final = b"tierdarn"
VERSION: Final = 1
HELLO = struct.Struct("<8sI")
"""Magic and version; the name follows."""

MOST_NAME_BYTES: Final = 64
HELLO_BYTES: Final = HELLO.size + MOST_NAME_BYTES
WELCOME: Final = b"welcome"

COMMAND = np.dtype([("block", "<u4"), ("tier", "<u4")])
"""A wish: this block on the arena's tier of this number."""

GIVE_BACK: Final = 0xFFFFFFFF
"""In place of a block: what is free on this tier is to leave its memory to others."""

MOST_COMMANDS: Final = 1024
ANSWER_BYTES: Final = MOST_COMMANDS * COMMAND.itemsize


def pack_hello(name: str) -> bytes:
    """Returns a hello; of a long name its beginning."""
    return HELLO.pack(MAGIC, VERSION) + name.encode(errors="replace")[:MOST_NAME_BYTES]


def unpack_hello(message: bytes) -> str:
    """Returns the arena's name, printable.

    Raises:
        Damaged: it is no hello, or of another version.
    """
    if len(message) < HELLO.size or not message.startswith(MAGIC):
        raise Damaged("not an arena's hello")
    if len(message) > HELLO_BYTES:
        raise Damaged(f"an arena's name of more than {MOST_NAME_BYTES} bytes")
    _, version = HELLO.unpack_from(message)
    if version != VERSION:
        raise Damaged(
            f"an arena that speaks version {version}",
            hint=f"this tierd speaks version {VERSION}: use the same release in the program",
        )
    name = message[HELLO.size :].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in name)


def commands_in(message: bytes, blocks: int, tiers: int) -> NDArray[np.void]:
    """Returns the commands in a message that can be followed, GIVE_BACK too, in their order."""
    whole = len(message) // COMMAND.itemsize
    found = np.frombuffer(message, COMMAND, whole)
    is_known = (found["block"] < blocks) | (found["block"] == GIVE_BACK)
    known: NDArray[np.void] = found[is_known & (found["tier"] < tiers)]
    return known
