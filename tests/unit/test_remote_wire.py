# SPDX-License-Identifier: Apache-2.0
"""What donors and borrowers say to each other, and which bytes are lent."""

import os
import re
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import Damaged, NoRoom, TierdError
from tierd.model import PAGE_BYTES, NodeId
from tierd.remote.donor import Extents, take_memory
from tierd.remote.link import split_address
from tierd.remote.wire import Ask, Keys, Lease, Refusal, receive_ask, receive_lease, send

BLOCK = 4096


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    keys = Keys(ca=tmp_path / "ca.pem", cert=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    with pytest.raises(TierdError, match=r"ca\.pem.*No such file") as raised:
        keys.context(is_donor=False)
    assert raised.value.hint is not None


def test_a_host_keeps_its_reserve() -> None:
    with pytest.raises(NoRoom, match="MiB free"):
        take_memory(1 << 20, 1 << 60)
    with pytest.raises(NoRoom, match="node 999 has no memory"):
        take_memory(1 << 20, 0, [NodeId(999)])


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host-a:7431", ("host-a", 7431)),
        ("host-a", ("host-a", 7430)),
        ("[::1]:7431", ("::1", 7431)),
        ("[::1]", ("::1", 7430)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", ":7430", "host:port", "host:70000"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(TierdError, match="is no host:port"):
        split_address(address)


ASK = Ask(block_bytes=BLOCK, slots=9)


def said(data: bytes, receive: Callable[[socket.socket], object]) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.close()
        ours.settimeout(5)
        return receive(ours)


def sent(message: Ask | Lease | Refusal) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(theirs, message)
        return ours.recv(1 << 16)


def test_messages_arrive_as_they_were() -> None:
    lease = Lease(donor="d", lease="l", keep_s=9, address=1 << 40, slots=3, ticket=os.urandom(300))
    assert said(sent(ASK), receive_ask) == ASK
    assert said(sent(lease), lambda channel: receive_lease(channel, ASK)) == lease
    refusal = Refusal(why="all of it is lent")
    assert said(sent(refusal), lambda channel: receive_lease(channel, ASK)) == refusal


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_damaged_or_the_end(noise: bytes, with_length: bool) -> None:
    data = len(noise).to_bytes(4, "little") + noise if with_length else noise
    for receive in (receive_ask, lambda channel: receive_lease(channel, ASK)):
        with pytest.raises((Damaged, OSError)):
            said(data, receive)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (b'{"version": 2}', "version 2"),
        (b'{"version": 1, "block_bytes": 4096}', "slots is None"),
        (b'{"version": 1, "block_bytes": true, "slots": 1}', "block_bytes is True"),
        (b'{"version": 1, "block_bytes": 4096, "slots": 1e9}', "slots is 1"),
        (b'{"version": 1, "block_bytes": 4096, "slots": -1}', "slots is -1"),
        (b"[1]", "no JSON object"),
        (b"[" * 60_000, "no JSON"),
    ],
)
def test_what_is_no_ask(what: bytes, why: str) -> None:
    with pytest.raises(Damaged, match=re.escape(why)):
        said(len(what).to_bytes(4, "little") + what, receive_ask)


def test_a_lease_of_more_than_was_asked_for_is_refused() -> None:
    lease = Lease(donor="d", lease="l", keep_s=9, address=1 << 40, slots=10, ticket=b"ticket")
    with pytest.raises(Damaged, match="slots is 10, and not from 1 to 9"):
        said(sent(lease), lambda channel: receive_lease(channel, ASK))


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 12)), max_size=12))
def test_no_byte_is_lent_twice(asks: list[tuple[int, int]]) -> None:
    extents, lent = Extents(16 * PAGE_BYTES), list[range]()
    for number, (unit, most) in enumerate(asks):
        part = extents.take(unit, most)
        if part is not None:
            assert len(part) >= unit
            assert part.start % PAGE_BYTES == 0
            lent.append(part)
        if number % 3 == 2 and lent:
            extents.give(lent.pop(0))
        parts = sorted([*lent, *extents.free], key=lambda each: each.start)
        assert parts[0].start == 0
        assert parts[-1].stop == extents.size_bytes
        assert all(a.stop == b.start for a, b in pairwise(parts))
