# SPDX-License-Identifier: Apache-2.0
"""A donor as tierctl and Prometheus see it. Its borrowers speak the protocol, and copy nothing."""

import json
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import jsonschema
import numpy as np
import pytest
import trustme
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from sweeps.donors import HOST, make_keys

from tests.unit.test_leases import until
from tierd.api.app import App
from tierd.api.client import Client
from tierd.api.endpoints import serving_api
from tierd.api.lending import OPERATIONS, Lending
from tierd.api.sockets import CONTROL, DONOR, MONITOR
from tierd.cli.control import main
from tierd.cli.donor import answering
from tierd.errors import NotFound, TierdError
from tierd.model import NodeId
from tierd.remote.donor import Donor, Ended, Refused
from tierd.remote.wire import LEAVES, Ask, Keys, Lease, Refusal, receive_lease, send

BLOCK, BLOCKS = 4096, 16
Tierctl = Callable[..., Result]


class FakeLent:
    """Memory that nobody copies to."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.address, self.ticket = memory.ctypes.data, b"ticket"

    def end(self) -> None:
        pass


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"), trustme.CA(), "host-d")


@pytest.fixture
def donor(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Donor]:
    monkeypatch.setattr("tierd.remote.donor.Lent", FakeLent)
    monkeypatch.setattr("tierd.remote.donor.SILENCE_S", 60.0)
    monkeypatch.setattr("tierd.remote.donor._LOOK_S", 0.02)
    with socket.create_server((HOST, 0)) as listener:
        donor = Donor(np.zeros(BLOCKS * BLOCK, np.uint8), listener, keys, ["host-d"])
        serving = threading.Thread(target=donor.serve)
        serving.start()
        try:
            yield donor
        finally:
            donor.stop()
            serving.join()


@pytest.fixture
def lending(donor: Donor) -> Lending:
    address = f"{HOST}:{donor._listener.getsockname()[1]}"
    return Lending(donor=donor, address=address, nodes=[NodeId(0)], reserve_bytes=1 << 20)


@pytest.fixture
def sockets(lending: Lending, tmp_path: Path) -> Iterator[Path]:
    with serving_api(tmp_path, partial(App, lending, lending, name=DONOR), OPERATIONS):
        yield tmp_path


@pytest.fixture
def tierctl(sockets: Path) -> Tierctl:
    """Runs tierctl donor against the donor."""
    words = ["--runtime-dir", str(sockets)]
    return lambda *more: CliRunner().invoke(main, ["donor", *more, *words], prog_name="tierctl")


@contextmanager
def connected(lending: Lending, keys: Keys) -> Iterator[ssl.SSLSocket]:
    plain = socket.create_connection((HOST, int(lending.address.rpartition(":")[2])), 10)
    with keys.context(is_donor=False).wrap_socket(plain, server_hostname=HOST) as channel:
        yield channel


def ask(channel: ssl.SSLSocket, blocks: int) -> Lease | Refusal:
    wanted = Ask(block_bytes=BLOCK, slots=blocks)
    send(channel, wanted)
    return receive_lease(channel, wanted)


@contextmanager
def borrowing(lending: Lending, keys: Keys, blocks: int) -> Iterator[ssl.SSLSocket]:
    with connected(lending, keys) as channel:
        assert isinstance(ask(channel, blocks), Lease)
        yield channel
    until(lambda: not lending.donor.borrowers)


def status(lending: Lending) -> dict[str, Any]:
    described = next(each for each in OPERATIONS if each.path == "/v1/status")
    told = lending.status()
    jsonschema.validate(told, described.answer)
    return told


def test_the_status_tells_who_borrows_what(lending: Lending, keys: Keys) -> None:
    with borrowing(lending, keys, 3):
        told = status(lending)
        [borrower] = told["borrowers"]
        assert borrower.pop("since") > "2026"
        assert borrower == {"name": "host-d", "address": HOST, "bytes": 3 * BLOCK}
        sizes = (told["capacity"], told["borrowed"], told["free"])
        assert sizes == (16 * BLOCK, 3 * BLOCK, 13 * BLOCK)
    until(lambda: status(lending)["borrowed"] == 0)
    assert (status(lending)["borrowers"], status(lending)["leases"]) == ([], 1)


def test_what_became_of_all_who_came_is_counted(
    lending: Lending, keys: Keys, tmp_path: Path
) -> None:
    stranger = make_keys(tmp_path, trustme.CA(), "stranger")
    believing = Keys(ca=keys.ca, cert=stranger.cert, key=stranger.key)
    with borrowing(lending, keys, BLOCKS), connected(lending, keys) as second:
        assert isinstance(ask(second, 1), Refusal)
    with connected(lending, keys) as garbled:
        garbled.sendall(b"\xff" * 64)
        assert isinstance(receive_lease(garbled, Ask(block_bytes=BLOCK, slots=1)), Refusal)
    with pytest.raises(OSError), connected(lending, believing) as channel:  # noqa: PT011 - reset, or TLS's own
        ask(channel, 1)
    lending.donor.leaves = True
    with connected(lending, keys) as late:
        assert isinstance(ask(late, 1), Refusal)
    wanted = {"stranger": 1, "busy": 0, "full": 1, "leaves": 1, "failed": 1}
    until(lambda: status(lending)["refused"] == wanted)
    until(lambda: status(lending)["ended"]["given_back"] == 1)


def test_a_borrower_that_is_silent_is_lost(
    lending: Lending, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending.donor, "_keep_s", 1)
    with borrowing(lending, keys, 1):
        until(lambda: status(lending)["ended"]["silent"] == 1)
    assert status(lending)["borrowers"] == []


def test_its_metrics_are_prometheuss_and_those_of_its_status(lending: Lending, keys: Keys) -> None:
    with borrowing(lending, keys, 3):
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(lending.metrics())
            for sample in family.samples
        }
    assert samples["tierd_donor_capacity_bytes",] == 16 * BLOCK
    assert samples["tierd_donor_borrowed_bytes",] == 3 * BLOCK
    assert (samples["tierd_donor_borrowers",], samples["tierd_donor_draining",]) == (1, 0)
    assert samples["tierd_donor_reserve_bytes",] == 1 << 20
    assert samples["tierd_donor_leases_total",] == 1
    assert {("tierd_donor_refused_total", why) for why in Refused} <= samples.keys()
    assert {("tierd_donor_ended_total", how) for how in Ended} <= samples.keys()
    assert ("process_resident_memory_bytes",) in samples


def test_over_tcp_metrics_alone_are_told(lending: Lending, tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as free:
        address = f"{HOST}:{free.getsockname()[1]}"
    with answering(lending, tmp_path / "run", address):
        assert b"tierd_donor_borrowers 0.0" in urlopen(f"http://{address}/metrics").read()
        with pytest.raises(HTTPError, match="404") as raised:
            urlopen(f"http://{address}/v1/status")
        raised.value.close()


def test_where_sockets_cannot_be_is_told(lending: Lending, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(TierdError, match=r"file/run: Not a directory") as raised,
        answering(lending, tmp_path / "file/run", None),
    ):
        pass
    assert raised.value.hint == "run it with sudo, or give --runtime-dir"


def test_anybody_may_ask_and_only_the_group_may_tell(sockets: Path) -> None:
    modes = {name: stat.S_IMODE((sockets / name).stat().st_mode) for name in (CONTROL, MONITOR)}
    assert modes[MONITOR] == 0o666
    assert modes[CONTROL] & 0o007 == 0
    assert Client(sockets / MONITOR).get("/v1/status")["leaves"] is False
    with pytest.raises(NotFound):
        Client(sockets / MONITOR).request("PUT", "/v1/drain")
    assert Client(sockets / MONITOR).get("/openapi.json")["info"]["title"] == DONOR


@pytest.mark.parametrize(
    "noise", [b"\x16\x03\x01garbage\r\n\r\n", b"PUT /v1/drain HTTP/1.1\r\n\r\n" * 9]
)
def test_noise_on_a_socket_changes_nothing(lending: Lending, sockets: Path, noise: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(10)
        channel.connect(str(sockets / MONITOR))
        channel.sendall(noise)
        channel.shutdown(socket.SHUT_WR)
        assert channel.recv(64).partition(b"\r\n")[0].split()[1] in (b"400", b"404")
    assert Client(sockets / CONTROL).get("/v1/status")["leaves"] is False


def test_tierctl_shows_the_donor(lending: Lending, keys: Keys, tierctl: Tierctl) -> None:
    assert tierctl("status").output.endswith("\n\nnobody borrows\n")
    with borrowing(lending, keys, 3):
        told = tierctl("status")
        assert told.exit_code == 0, told.output
        headline, memory, borrowers = told.output.split("\n\n")
        assert f"lends, at {lending.address}; 1 leases, 0 refused" in headline
        assert memory.splitlines()[1].split()[:6] == ["64", "KiB", "12", "KiB", "52", "KiB"]
        assert borrowers.splitlines()[1].split()[:4] == ["host-d", HOST, "12", "KiB"]
        assert json.loads(tierctl("status", "--json").output)["borrowed"] == 3 * BLOCK


def test_where_no_donor_runs_the_next_step_is_told(tmp_path: Path) -> None:
    words = ["donor", "status", "--runtime-dir", str(tmp_path)]
    told = CliRunner().invoke(main, words, prog_name="tierctl")
    assert told.exit_code == 1
    assert told.output == (
        f"tierctl: error: no tierd-donor is running on {tmp_path}\n"
        "tierctl: hint: start it with: systemctl start tierd-donor, or in the foreground: "
        "tierd-donor run\n"
    )


@contextmanager
def leaving_when_asked(lending: Lending, keys: Keys) -> Iterator[None]:
    """A borrower that gives its memory back once it is asked to."""
    with connected(lending, keys) as channel:
        assert isinstance(ask(channel, 3), Lease)

        def beat() -> None:
            channel.sendall(b".")
            while channel.recv(1) != LEAVES:
                channel.sendall(b".")
            channel.close()

        beating = threading.Thread(target=beat)
        beating.start()
        yield
        beating.join()


def test_drained_nobody_borrows_until_it_is_undone(
    lending: Lending, keys: Keys, tierctl: Tierctl
) -> None:
    with leaving_when_asked(lending, keys):
        told = tierctl("drain")
    assert told.exit_code == 0, told.output
    assert told.output.splitlines()[-1] == "nobody borrows, and nothing is lent until --undo"
    assert lending.donor.leaves
    assert "asks to be left, and lends nothing more, at" in tierctl("status").output
    assert json.loads(tierctl("drain", "--json").output)["borrowed"] == 0
    with connected(lending, keys) as channel:
        assert ask(channel, 1) == Refusal(why="nothing is lent any more")
    assert tierctl("drain", "--undo").output == "lends again\n"
    with borrowing(lending, keys, 1):
        assert not lending.donor.leaves


def test_a_drain_can_be_tried(lending: Lending, keys: Keys, tierctl: Tierctl) -> None:
    with borrowing(lending, keys, 3):
        told = tierctl("drain", "--dry-run")
        assert told.output.startswith("would be asked to move away:\nBORROWER  ")
        assert "\nhost-d  " in told.output
    assert not lending.donor.leaves
    assert tierctl("drain", "--dry-run", "--undo").exit_code == 2


def test_who_stays_is_told_and_asked_on(lending: Lending, keys: Keys, tierctl: Tierctl) -> None:
    with borrowing(lending, keys, 3):
        told = tierctl("drain", "--timeout", "0")
    assert told.exit_code == 1
    assert "error: after 0 s 1 borrowers have 12 KiB still" in told.output
    assert "lend again: tierctl donor drain --undo" in told.output
    assert lending.donor.leaves


def clock_that(sleep: Callable[[float], None]) -> SimpleNamespace:
    """What stands for the module time in tierctl's wait."""
    return SimpleNamespace(sleep=sleep, monotonic=float)


def test_an_interrupt_leaves_it_draining(
    lending: Lending, keys: Keys, tierctl: Tierctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with borrowing(lending, keys, 3):
        with monkeypatch.context() as patch:
            patch.setattr("tierd.cli.lending.time", clock_that(interrupt))
            told = tierctl("drain")
        assert told.exit_code == 1
        assert "borrowers are asked all the same; tierctl donor drain --undo ends it" in told.output
        assert lending.donor.leaves


def test_a_drain_that_somebody_ends_is_waited_for_no_more(
    lending: Lending, keys: Keys, tierctl: Tierctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_: float) -> None:
        lending.drain(wanted=False)

    with borrowing(lending, keys, 3):
        with monkeypatch.context() as patch:
            patch.setattr("tierd.cli.lending.time", clock_that(end))
            told = tierctl("drain")
        assert told.exit_code == 1
        assert "somebody has it lend again, and 1 borrowers have 12 KiB still" in told.output
