# SPDX-License-Identifier: Apache-2.0
"""Donors in a real etcd that comes and goes, and borrowers that look for them."""

import logging
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from sweeps.donors import BY_TCP, HOST, DonorProcess, make_keys

from tests.hosts.etcd import EtcdProcess, start_members
from tests.unit.test_leases import until
from tierd.arena import Arena
from tierd.errors import NoRoom, TierdError
from tierd.remote import registry
from tierd.remote.etcd import Away, Etcd
from tierd.remote.link import Link
from tierd.remote.registry import PREFIX, Directory, Record, Registration
from tierd.remote.wire import Keys
from tierd.tiers.memory import dram
from tierd.tiers.rdma import rdma

LENT_MIB, BLOCK = 4, 4096
A, B = "10.0.0.1:7430", "10.0.0.2:7430"
AN_HOUR_S = 3600

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd")


@pytest.fixture(autouse=True)
def _all_threads_end() -> Iterator[None]:
    yield
    left = {thread.name for thread in threading.enumerate()} & {"directory", "registration"}
    assert not left


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    server = EtcdProcess(tmp_path)
    yield server
    server.end()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def directory(etcd: EtcdProcess) -> Iterator[Directory]:
    with closing(Directory([etcd.endpoint])) as directory:
        yield directory


@pytest.fixture
def client(etcd: EtcdProcess) -> Iterator[Etcd]:
    with closing(etcd.client()) as client:
        yield client


def at(address: str) -> Callable[[], Record]:
    return lambda: Record(id="5f0c", address=address, lent_bytes=1024, free_bytes=512)


def register(
    etcd: EtcdProcess, stack: ExitStack, name: str, address: str, lease_s: int = 1
) -> Registration:
    registration = Registration(etcd.client(), name, at(address), lease_s=lease_s)
    return stack.enter_context(closing(registration))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"), trustme.CA(), "host")


@pytest.fixture
def by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BY_TCP.items():
        monkeypatch.setenv(name, value)


def lending(etcd: EtcdProcess, keys: Keys, name: str, lease_s: int = 1) -> DonorProcess:
    told = ["--etcd", etcd.endpoint, "--name", name, "--advertise", HOST]
    return DonorProcess(keys, LENT_MIB, *told, "--etcd-lease", str(lease_s))


@pytest.mark.usefixtures("by_tcp")
def test_an_arena_borrows_from_who_comes_and_forgets_who_has_gone(
    etcd: EtcdProcess, directory: Directory, keys: Keys, stack: ExitStack
) -> None:
    ids = np.arange(100)
    data = np.random.default_rng(1).integers(0, 256, (100, BLOCK), dtype=np.uint8)
    tier = rdma(directory, 128 * BLOCK, ca=keys.ca, cert=keys.cert, key=keys.key, deadline_s=1.0)
    with pytest.raises(NoRoom, match="2 replicas need as many donors, and 0 lend: no others"):
        tier.reserve(BLOCK, 128)
    donors = []
    for name in ("host-a", "host-b"):
        donors.append(lending(etcd, keys, name))
        stack.callback(donors[-1].end)
    until(lambda: len(directory.addresses()) == 2)
    with Arena(BLOCK, [dram(16 * BLOCK), tier], blocks=100) as arena:
        arena.write(ids, data)
        [space] = tier.spaces
        donors.append(lending(etcd, keys, "host-c"))
        stack.callback(donors[-1].end)
        until(lambda: donors[2].address in space.donors)
        donors[0].send(signal.SIGKILL)
        until(lambda: directory.addresses() == tuple(sorted(d.address for d in donors[1:])))
        assert (arena.read(ids) == data).all()
        until(lambda: space.copies.thin == 0)
        donors[1].send(signal.SIGKILL)
        assert (arena.read(ids) == data).all()
        assert space.copies.lost == 0


def test_donors_join_leave_and_expire(
    etcd: EtcdProcess,
    directory: Directory,
    keys: Keys,
    stack: ExitStack,
    by_tcp: None,
) -> None:
    assert directory.addresses() == ()
    donors = []
    for name, lease_s in (("host-a", AN_HOUR_S), ("host-b", 1)):
        donors.append(lending(etcd, keys, name, lease_s))
        stack.callback(donors[-1].end)
    until(lambda: directory.addresses() == tuple(sorted(donor.address for donor in donors)))
    assert {record.lent_bytes for record in directory.records().values()} == {LENT_MIB << 20}
    link = Link(directory.records()["host-b"].address, keys, BLOCK, 16, 5.0)
    left = (LENT_MIB << 20) - 16 * BLOCK
    until(lambda: directory.records()["host-b"].free_bytes == left)
    link.end()
    until(lambda: directory.records()["host-b"].free_bytes == LENT_MIB << 20)
    donors[0].send(signal.SIGTERM)
    assert donors[0].process.wait(30) == 0
    until(lambda: directory.addresses() == (donors[1].address,))
    donors[1].send(signal.SIGKILL)
    until(lambda: directory.addresses() == ())
    assert directory.failure is None


@pytest.mark.parametrize("data", ["data", "other"])
def test_etcd_dies_and_is_started_with_its_data_or_with_none(
    etcd: EtcdProcess, directory: Directory, stack: ExitStack, data: str
) -> None:
    registration = register(etcd, stack, "host-a", A)
    until(lambda: directory.addresses() == (A,))
    etcd.end()
    until(lambda: directory.failure is not None and registration.failure is not None)
    assert directory.addresses() == (A,)
    assert etcd.endpoint in str(directory.failure)
    etcd.start(data)
    until(lambda: directory.failure is None and registration.failure is None)
    until(lambda: directory.addresses() == (A,))
    register(etcd, stack, "host-b", B)
    until(lambda: directory.addresses() == (A, B))


def test_etcd_is_stopped_for_longer_than_leases_last(
    etcd: EtcdProcess,
    directory: Directory,
    client: Etcd,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "LIST_EVERY_S", 0.2)
    registration = register(etcd, stack, "host-a", A)
    until(lambda: directory.addresses() == (A,))
    etcd.send(signal.SIGSTOP)
    until(lambda: directory.failure is not None and registration.failure is not None)
    assert directory.addresses() == (A,)
    etcd.send(signal.SIGCONT)
    until(lambda: directory.failure is None and registration.failure is None)
    until(lambda: client.get(f"{PREFIX}host-a") is not None and directory.addresses() == (A,))


def test_a_member_that_is_cut_off_from_the_others_tells_nothing(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "LIST_EVERY_S", 0.2)
    members = start_members(tmp_path, 3)
    for member in members:
        stack.callback(member.end)
    until(lambda: all(member.answers() for member in members))
    register(members[1], stack, "host-a", A, AN_HOUR_S)
    directory = stack.enter_context(closing(Directory([members[0].endpoint])))
    both = stack.enter_context(closing(Directory([each.endpoint for each in members[:2]])))
    until(lambda: directory.addresses() == both.addresses() == (A,))
    members[1].send(signal.SIGSTOP)
    members[2].send(signal.SIGSTOP)
    until(lambda: directory.failure is not None and both.failure is not None)
    assert directory.addresses() == both.addresses() == (A,)
    members[1].send(signal.SIGCONT)
    until(lambda: directory.failure is None and both.failure is None)
    assert directory.addresses() == both.addresses() == (A,)


def test_a_lease_that_is_gone_is_asked_for_again(
    etcd: EtcdProcess, client: Etcd, stack: ExitStack
) -> None:
    registration = register(etcd, stack, "host-a", A)
    key = f"{PREFIX}host-a"
    until(lambda: client.get(key) is not None)
    first = registration._lease
    assert first is not None
    client.revoke(first)
    until(lambda: client.get(key) is not None)
    there = client.get(key)
    assert there is not None
    assert there.lease not in (0, first)


def test_garbage_is_left_out_and_named_once(
    etcd: EtcdProcess,
    directory: Directory,
    client: Etcd,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    good = at(A)().encode()
    garbage = {
        "noise": b"\xff\x00",
        "newer": good.replace(b'"version": 1', b'"version": 2'),
        "nowhere": good.replace(b":7430", b":0"),
        "large": b" " * 100_000 + good,
        "\n": b"{}",
    }
    for name, data in garbage.items():
        assert client.put(PREFIX + name, data, 0, None)
    register(etcd, stack, "host-a", A)
    until(lambda: directory.addresses() == (A,))
    register(etcd, stack, "host-b", B)
    until(lambda: directory.addresses() == (A, B))
    said = [line for line in caplog.messages if "is left out" in line]
    assert len(said) == len(garbage)
    assert any("'newer' is left out: of version 2, and this is 1" in line for line in said)
    assert any(r"'\n' is left out" in line for line in said)
    over = client.get(f"{PREFIX}noise")
    assert client.put(f"{PREFIX}noise", at("10.0.0.3:7430")().encode(), 0, over)
    until(lambda: len(directory.addresses()) == 3)
    assert set(directory.records()) == {"host-a", "host-b", "noise"}


def test_more_donors_than_there_may_be_are_left_out(
    etcd: EtcdProcess, client: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MOST_DONORS", 2)
    for number in range(4):
        assert client.put(f"{PREFIX}host-{number}", at(f"10.0.0.{number}:1")().encode(), 0, None)
    with closing(Directory([etcd.endpoint])) as directory:
        assert directory.addresses() == ("10.0.0.0:1", "10.0.0.1:1")


def test_a_name_is_one_live_donors(
    etcd: EtcdProcess, directory: Directory, stack: ExitStack
) -> None:
    first = register(etcd, stack, "host-a", A)
    until(lambda: directory.addresses() == (A,))
    second = register(etcd, stack, "host-a", B)
    until(lambda: second.failure is not None)
    assert "another donor is registered" in str(second.failure)
    assert directory.addresses() == (A,)
    assert first.failure is None
    first.close()
    until(lambda: directory.addresses() == (B,))
    until(lambda: second.failure is None)


def test_a_donor_that_starts_again_has_its_name_at_once(
    etcd: EtcdProcess, client: Etcd, stack: ExitStack
) -> None:
    key, lease = f"{PREFIX}host-a", client.grant(AN_HOUR_S)
    assert client.put(key, at(A)().encode(), lease, None)
    register(etcd, stack, "host-a", A)
    until(lambda: (there := client.get(key)) is not None and there.lease != lease)


def test_a_put_over_what_has_changed_is_none(client: Etcd) -> None:
    assert client.put("/key", b"first", 0, None)
    assert not client.put("/key", b"second", 0, None)
    there = client.get("/key")
    assert there is not None
    assert client.put("/key", b"second", 0, there)
    assert not client.put("/key", b"third", 0, there)


def test_a_wait_ends_with_a_change_and_where_its_past_is_compacted(client: Etcd) -> None:
    for value in (b"1", b"2", b"3"):
        assert client.put("/keys/a", value, 0, client.get("/keys/a"))
    _, revision = client.read("/keys/", 10)
    client.wait_for_change("/keys/", revision - 1, AN_HOUR_S)
    for longest_s in (0.01, 0.05, 0.1):
        client.wait_for_change("/keys/", revision, longest_s)
    request = client._rpc.CompactionRequest(revision=revision)
    client._rpc.KVStub(client._channel).Compact(request)
    client.wait_for_change("/keys/", revision - 2, AN_HOUR_S)


def test_a_wait_ends_when_it_is_closed(etcd: EtcdProcess) -> None:
    client = etcd.client()
    threading.Timer(0.1, client.close).start()
    with pytest.raises(Away):
        client.wait_for_change("/keys/", 1, AN_HOUR_S)
    with pytest.raises(Away, match="left"):
        client.get("/keys/a")


def test_where_there_is_no_etcd(etcd: EtcdProcess, stack: ExitStack) -> None:
    etcd.end()
    with pytest.raises(TierdError, match=rf"not known: etcd {etcd.endpoint}: .*refused") as raised:
        Directory([etcd.endpoint])
    assert "is etcd there" in str(raised.value.hint)
    silent = stack.enter_context(closing(socket.create_server((HOST, 0)))).getsockname()[1]
    with pytest.raises(TierdError, match=f"etcd {HOST}:{silent}"):
        Directory([f"{HOST}:{silent}"])
    registration = register(etcd, stack, "host-a", A)
    until(lambda: registration.failure is not None)


def test_endpoints_are_tried_in_turn(etcd: EtcdProcess, stack: ExitStack) -> None:
    with closing(socket.create_server((HOST, 0))) as nobody:
        wrong = f"{HOST}:{nobody.getsockname()[1]}"
    register(etcd, stack, "host-a", A, AN_HOUR_S)
    both = Registration(Etcd([wrong, etcd.endpoint]), "host-b", at(B), lease_s=AN_HOUR_S)
    stack.enter_context(closing(both))
    with closing(Directory([wrong, etcd.endpoint])) as directory:
        until(lambda: directory.addresses() == (A, B))


def test_etcd_is_spoken_to_with_tls(tmp_path: Path, keys: Keys, stack: ExitStack) -> None:
    etcd = EtcdProcess(tmp_path, keys)
    stack.callback(etcd.end)
    register(etcd, stack, "host-a", A)
    files: dict[str, Any] = {"ca": keys.ca, "cert": keys.cert, "key": keys.key}
    with closing(Directory([etcd.endpoint], **files)) as directory:
        until(lambda: directory.addresses() == (A,))
    (tmp_path / "other").mkdir()
    stranger = make_keys(tmp_path / "other", trustme.CA(), "stranger")
    wrong: list[dict[str, Any]] = [
        {},
        {"ca": keys.ca},
        {"ca": stranger.ca, "cert": keys.cert, "key": keys.key},
        {"ca": keys.ca, "cert": stranger.cert, "key": stranger.key},
    ]
    for each in wrong:
        with pytest.raises(TierdError, match="the donors are not known"):
            Directory([etcd.endpoint], **each)
