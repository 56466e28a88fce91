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

LIMIT: Final = 0xFFFFFFFE
"""In place of a block: the program's movers are to copy no more to and from a tier.

`tier` has its number in the low byte, and MiB a second in the other three, 0 for no limit. A
program that is older counts it as wrong, and has none.
"""

MOST_MBPS: Final = (1 << 24) - 1
_NUMBER_BITS: Final = 8
_NUMBER: Final = (1 << _NUMBER_BITS) - 1

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


def limit_command(tier: int, mbps: int | None) -> NDArray[np.void]:
    """Returns the command that sets a tier's limit, or ends it."""
    return np.array([(LIMIT, tier | (mbps or 0) << _NUMBER_BITS)], COMMAND)


def unpack_limit(tier: int) -> tuple[int, int | None]:
    """Returns the number of the tier and the MiB a second that a LIMIT's `tier` has."""
    return tier & _NUMBER, tier >> _NUMBER_BITS or None


def commands_in(message: bytes, blocks: int, tiers: int) -> NDArray[np.void]:
    """Returns the commands in a message that can be followed, in their order."""
    whole = len(message) // COMMAND.itemsize
    found = np.frombuffer(message, COMMAND, whole)
    is_limit = found["block"] == LIMIT
    is_known = (found["block"] < blocks) | (found["block"] == GIVE_BACK) | is_limit
    number = np.where(is_limit, found["tier"] & _NUMBER, found["tier"])
    known: NDArray[np.void] = found[is_known & (number < tiers)]
    return known
