# SPDX-License-Identifier: Apache-2.0
"""Real donors, each a process, and a borrower that has their memory by NIXL over TCP."""

import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import trustme
from sweeps.donors import BY_TCP, HOST, DonorProcess, make_keys

from tests.unit.test_leases import until
from tierd.arena import Arena
from tierd.errors import NoRoom, TierdError, TierFailed
from tierd.kernel import nixl
from tierd.kernel.nixl import load_nixl
from tierd.remote.link import Link
from tierd.remote.space import RemoteSpace
from tierd.remote.wire import SILENCE_S, Keys
from tierd.tiers import Tier, load
from tierd.tiers.kit import TierContract
from tierd.tiers.memory import dram
from tierd.tiers.rdma import rdma

LENT_MIB, BLOCK = 4, 4096


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"), trustme.CA(), "host")


@pytest.fixture(scope="module", autouse=True)
def by_tcp() -> Iterator[None]:
    """As between hosts: within one, UCX would take shared memory."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in BY_TCP.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def donors(keys: Keys) -> Iterator[list[DonorProcess]]:
    with ExitStack() as stack:
        found = []
        for _ in range(3):
            found.append(DonorProcess(keys, LENT_MIB))
            stack.callback(found[-1].end)
        yield found


@pytest.fixture(scope="module")
def two_donors(keys: Keys) -> Iterator[list[DonorProcess]]:
    with ExitStack() as stack:
        found = [DonorProcess(keys, LENT_MIB) for _ in range(2)]
        for donor in found:
            stack.callback(donor.end)
        yield found


def tier_on(donors: list[DonorProcess], keys: Keys, **more: float) -> Tier:
    options = {"capacity_bytes": 128 * BLOCK, **more}
    files = {"ca": keys.ca, "cert": keys.cert, "key": keys.key}
    return load("rdma", {"donors": [donor.address for donor in donors], **options, **files})


class TestOnDonors(TierContract):
    @pytest.fixture(autouse=True)
    def _has(self, two_donors: list[DonorProcess], keys: Keys) -> None:
        self.donors, self.keys = two_donors, keys

    def make(self) -> Tier:
        return tier_on(self.donors, self.keys)


@contextmanager
def arena_on(tier: Tier) -> Iterator[tuple[Arena, RemoteSpace]]:
    with Arena(BLOCK, [dram(16 * BLOCK), tier], blocks=100) as arena:
        space = arena._fences[1]._space
        assert isinstance(space, RemoteSpace)
        yield arena, space


def test_threads_of_agents_rest_while_there_is_nothing_to_do() -> None:
    """Each would take a CPU of its own: NIXL has them look again after 0 microseconds."""
    load_nixl()
    config = load_nixl().nixlBind.nixlAgentConfig()
    config.pthrDelay = 0
    assert config.pthrDelay == 50_000
    config.lthrDelay = 7
    assert config.lthrDelay == 7


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_donor_that_dies_or_stops_costs_no_byte(
    donors: list[DonorProcess], keys: Keys, how: signal.Signals
) -> None:
    ids = np.arange(100)
    data = np.random.default_rng(1).integers(0, 256, (100, BLOCK), dtype=np.uint8)
    with arena_on(tier_on(donors, keys)) as (arena, space):
        arena.write(ids, data)
        assert (arena.read(ids) == data).all()
        donors.sort(key=lambda donor: donor.address not in space.holders)  # a slow one is none
        first, second, _ = donors
        first.send(how)
        some = ids[:20]  # what is read is stored anew when it makes way; the rest is copied again
        assert (arena.read(some) == data[some]).all()
        until(lambda: first.address in space.failures)
        until(lambda: space.copies.copied_again > 0)  # none are known to be thin at first
        until(lambda: space.copies.thin == 0)
        assert (arena.read(ids) == data).all()
        second.send(how)
        assert (arena.read(ids) == data).all()
        assert arena.fenced == {}
        assert space.copies.lost == 0


def test_a_donor_that_starts_again_is_used_again(donors: list[DonorProcess], keys: Keys) -> None:
    ids = np.arange(100)
    data = np.random.default_rng(1).integers(0, 256, (100, BLOCK), dtype=np.uint8)
    pair = donors[:2]
    with arena_on(tier_on(pair, keys)) as (arena, space):
        arena.write(ids, data)
        pair[0].end()
        assert (arena.read(ids) == data).all()
        until(lambda: space.copies.thin > 0)
        again = DonorProcess(keys, LENT_MIB, port=pair[0].port)
        try:
            until(lambda: space.copies.thin == 0)
            pair[1].end()
            assert (arena.read(ids) == data).all()
        finally:
            again.end()


def test_a_donor_that_ends_is_left_first(donors: list[DonorProcess], keys: Keys) -> None:
    ids = np.arange(100)
    data = np.random.default_rng(1).integers(0, 256, (100, BLOCK), dtype=np.uint8)
    with arena_on(tier_on(donors, keys)) as (arena, space):
        arena.write(ids, data)
        donors[0].send(signal.SIGTERM)
        assert donors[0].process.wait(30) == 0
        assert space.copies.thin == 0
        assert (arena.read(ids) == data).all()


def link_to(donor: DonorProcess, keys: Keys, slots: int = 16, block_bytes: int = BLOCK) -> Link:
    return Link(donor.address, keys, block_bytes, slots, 1.0)


def test_a_borrower_that_ends_leaves_nothing_to_the_next(
    two_donors: list[DonorProcess], keys: Keys
) -> None:
    def given_back() -> int:
        return "".join(two_donors[0].said).count("borrows nothing any more")

    everything = LENT_MIB << 20
    secret = np.full((16, BLOCK), 0x5E, np.uint8)
    with closing_link(link_to(two_donors[0], keys, everything // BLOCK)) as link:
        assert link.slots == everything // BLOCK
        link.write(np.arange(16), secret)
        with pytest.raises(NoRoom, match="all of it is lent"):
            link_to(two_donors[0], keys)
        before = given_back()
    found = np.ones((16, BLOCK), np.uint8)
    until(lambda: given_back() > before)
    with closing_link(link_to(two_donors[0], keys)) as link:
        link.read(np.arange(16), found)
    assert not found.any()


@contextmanager
def closing_link(link: Link) -> Iterator[Link]:
    try:
        yield link
    finally:
        link.end()


def test_a_network_that_is_down_has_a_donor_be_away(
    two_donors: list[DonorProcess], keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL does not start then, which it has to for what is copied aside."""

    def no_device(**_: bool) -> None:
        raise TierdError("NIXL does not start: NIXL_ERR_BACKEND")

    into, data = np.zeros((4, BLOCK), np.uint8), np.full((4, BLOCK), 7, np.uint8)
    with closing_link(link_to(two_donors[0], keys)) as link:
        link.write(np.arange(4), data)
        with monkeypatch.context() as patch:
            patch.setattr(nixl, "_agent", no_device)
            with pytest.raises(TierFailed, match="NIXL does not start"):
                link.read(np.arange(4), into, aside=nullcontext)
            assert link.away is not None
            with pytest.raises(TierFailed):
                link.resume()
        link.resume()
        link.read(np.arange(4), into, aside=nullcontext)
    assert (into == data).all()


@pytest.mark.parametrize(
    ("block_bytes", "steps"),
    [(64 << 10, 1), (4096, 1), (1 << 20, 8), (768 << 10, 6), (257 << 12, 16)],
)
def test_what_is_copied_aside_is_copied_in_steps(
    two_donors: list[DonorProcess], keys: Keys, block_bytes: int, steps: int
) -> None:
    """Of 256 KiB at most, also of larger blocks."""
    data = np.random.default_rng(1).integers(0, 256, (2, block_bytes), dtype=np.uint8)
    into, made = np.zeros_like(data), []

    @contextmanager
    def step() -> Iterator[None]:
        made.append(1)
        yield

    slots = np.array([1, 0])
    with closing_link(link_to(two_donors[0], keys, 2, block_bytes)) as link:
        link.write(slots, data, aside=step)
        assert len(made) == steps
        link.read(slots, into)
        assert (into == data).all()
        into[:] = 0
        link.read(slots[::-1], into, aside=step)
        assert (into == data[::-1]).all()


def test_strangers_get_nothing(keys: Keys, tmp_path: Path) -> None:
    stranger = make_keys(tmp_path, trustme.CA(), "stranger")
    believing = Keys(ca=keys.ca, cert=stranger.cert, key=stranger.key)
    donor = DonorProcess(keys, LENT_MIB, "--allow", "host")
    try:
        with pytest.raises(TierFailed, match="certificate verify failed"):
            link_to(donor, stranger)
        with pytest.raises(TierFailed):
            link_to(donor, believing)
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096)):
            with socket.create_connection((HOST, donor.port), 5) as plain:
                plain.sendall(noise)
        with socket.create_connection((HOST, donor.port), 5 * SILENCE_S) as silent:
            with closing_link(link_to(donor, keys)) as link:
                assert link.slots == 16
            assert silent.recv(1) == b"", "nobody is waited for for ever"
    finally:
        donor.end()


def test_who_is_not_allowed_borrows_nothing(keys: Keys) -> None:
    donor = DonorProcess(keys, LENT_MIB, "--allow", "somebody-else")
    try:
        with pytest.raises(TierFailed):
            link_to(donor, keys)
        until(lambda: "host is not allowed to borrow" in "".join(donor.said))
    finally:
        donor.end()


def test_the_same_donor_twice_is_no_second_host(two_donors: list[DonorProcess], keys: Keys) -> None:
    port = two_donors[0].port
    addresses = [f"{HOST}:{port}", f"{HOST}:0{port}"]
    tier = rdma(addresses, 64 * BLOCK, ca=keys.ca, cert=keys.cert, key=keys.key)
    with pytest.raises(TierdError, match="are the same one"):
        tier.reserve(BLOCK, 64)


def test_replicas_need_as_many_donors(two_donors: list[DonorProcess], keys: Keys) -> None:
    with closing(socket.create_server((HOST, 0))) as nobody:
        port = nobody.getsockname()[1]
    addresses = [two_donors[0].address, f"{HOST}:{port}"]
    tier = rdma(addresses, 64 * BLOCK, ca=keys.ca, cert=keys.cert, key=keys.key)
    with pytest.raises(NoRoom, match=r"2 replicas need as many donors, and 1 lend: .*refused"):
        tier.reserve(BLOCK, 64)


DOCUMENT = (Path(__file__).parents[2] / "docs/remote.md").read_text()


def test_the_documents_keys_and_example_work(tmp_path: Path) -> None:
    """Its hosts are names here for loopback, which is all that is changed."""
    [script] = re.findall(r"```sh\n(.*?)```", DOCUMENT, re.DOTALL)
    [example] = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    local = script.replace("DNS:$host", "IP:127.0.0.1")
    assert local != script
    subprocess.run(["bash", "-ec", local], cwd=tmp_path, check=True, capture_output=True)
    strict = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.pem", "host-a.pem", "host-d.pem"]
    subprocess.run(strict, cwd=tmp_path, check=True, capture_output=True)
    with ExitStack() as stack:
        for host in ("host-a", "host-b", "host-c"):
            files = {"cert": tmp_path / f"{host}.pem", "key": tmp_path / f"{host}.key"}
            donor = DonorProcess(
                Keys(ca=tmp_path / "ca.pem", **files), LENT_MIB, "--allow", "host-d"
            )
            stack.callback(donor.end)
            example = example.replace(f"{host}:7430", donor.address)
        example = example.replace("/etc/tierd/donors", str(tmp_path))
        example = example.replace("64 << 30", "2 << 20").replace("16 << 30", "1 << 20")
        example = example.replace("2 << 20, [", "4096, [")
        example = example.replace("...", "arena.write([0], bytes_of_one)")
        names = {"bytes_of_one": np.ones((1, 4096), np.uint8)}
        exec(compile(example, "docs/remote.md", "exec"), names)
