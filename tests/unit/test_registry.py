# SPDX-License-Identifier: Apache-2.0
"""Records of donors, read as what anybody may have put there."""

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import Damaged, TierdError
from tierd.remote.etcd import Etcd
from tierd.remote.registry import (
    MOST_BYTES,
    Directory,
    Record,
    Registration,
    advertised,
    parse_record,
)

GOOD = {
    "version": 1,
    "id": "5f0c",
    "address": "host-a:7430",
    "lent_bytes": 1024,
    "free_bytes": 512,
}
NOBODY = "127.0.0.1:9"


def told(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


@given(
    host=st.from_regex(r"[a-z0-9._-]{1,60}|\[[0-9a-f]{1,4}::[0-9a-f]{1,4}\]", fullmatch=True),
    port=st.integers(1, (1 << 16) - 1),
    number=st.integers(0, 1 << 64),
    sizes=st.tuples(st.integers(0, 1 << 60), st.integers(0, 1 << 60)),
)
def test_a_record_is_read_as_it_was_written(
    host: str, port: int, number: int, sizes: tuple[int, int]
) -> None:
    record = Record(
        id=f"{number:x}",
        address=f"{host}:{port}",
        lent_bytes=max(sizes),
        free_bytes=min(sizes),
    )
    assert parse_record(record.encode()) == record


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.binary(max_size=100) | JSON.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        parse_record(data)


@given(st.sampled_from(sorted(GOOD)), JSON)
def test_a_record_with_one_other_value_is_one_or_damaged(name: str, value: object) -> None:
    try:
        record = parse_record(told(**{name: value}))
    except Damaged:
        return
    assert 0 <= record.free_bytes <= record.lent_bytes
    assert parse_record(record.encode()) == record


def test_a_record_may_tell_more() -> None:
    assert parse_record(told(rack="7")) == parse_record(told())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b" " * (MOST_BYTES + 1), "4097 bytes, of 4096 at most"),
        (b"[" * MOST_BYTES, "no JSON"),
        (b'{"version": ' + b"1" * 4000 + b"}", "of version 1111"),
        (b"[1]", "no JSON object"),
        (told(version=2), "of version 2, and this is 1"),
        (told(id=""), "id is ''"),
        (told(id="5F0C"), "id is '5F0C'"),
        (told(id="5f0c\n"), r"id is '5f0c\n'"),
        (told(address="host-a"), "address is 'host-a'"),
        (told(address="host-a:0"), "port 0"),
        (told(address="host-a:70000"), "is no host:port"),
        (told(address="host a:7430"), "address is 'host a:7430'"),
        (told(address="höst:7430"), r"address is 'h\xf6st:7430'"),
        (told(address=["host-a:7430"]), "address is ['host-a:7430']"),
        (told(lent_bytes=1e3), "lent_bytes is 1000.0"),
        (told(lent_bytes=True), "lent_bytes is True"),
        (told(free_bytes=1025), "free_bytes is 1025, and not from 0 to 1024"),
        (told(free_bytes=-1), "free_bytes is -1"),
    ],
)
def test_what_is_no_record(data: bytes, why: str) -> None:
    with pytest.raises(Damaged, match=re.escape(why)):
        parse_record(data)


def test_one_donor_has_one_address() -> None:
    assert parse_record(told(address="Host-A:07430")).address == "host-a:7430"


def test_a_donor_is_advertised_by_name_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "host-a")
    assert advertised(None, 7431) == "host-a:7431"
    assert advertised("10.0.0.1", 7431) == "10.0.0.1:7431"
    assert advertised("[fd00::1]:99", 7431) == "[fd00::1]:99"
    with pytest.raises(TierdError, match="borrowers cannot be told to come to 'host a'"):
        advertised("host a", 7431)


def test_a_command_line_that_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(TierdError, match="no endpoint"):
        Directory([])
    with pytest.raises(TierdError, match="'etcd:port' is no host:port") as raised:
        Directory(["etcd:port"])
    assert raised.value.hint == "such as host-a:2379"
    with pytest.raises(TierdError, match="is no prefix"):
        Directory([NOBODY], prefix="")
    with pytest.raises(TierdError, match=r"keys for etcd: .*No such file"):
        Directory([NOBODY], ca=tmp_path / "ca.pem")
    with pytest.raises(TierdError, match="without its authority"):
        Directory([NOBODY], cert=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    with pytest.raises(TierdError, match="goes with its key"):
        Directory([NOBODY], ca=tmp_path / "ca.pem", cert=tmp_path / "cert.pem")
    etcd = Etcd([NOBODY])
    with pytest.raises(TierdError, match=r"'\.\./x' is no name of a donor"):
        Registration(etcd, "../x", lambda: parse_record(told()))
    etcd.close()


def test_without_aetcd_the_next_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aetcd", None)
    with pytest.raises(TierdError, match="need aetcd") as raised:
        Directory([NOBODY])
    assert raised.value.hint == "pip install 'tierd[rdma]'"
