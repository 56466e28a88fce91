# SPDX-License-Identifier: Apache-2.0
"""Real etcds, on loopback, that can be stopped, killed and started again."""

import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from sweeps.donors import HOST

from tests.unit.test_leases import until
from tierd.remote.etcd import Away, Etcd
from tierd.remote.wire import Keys

QUICK = ("--heartbeat-interval", "10", "--election-timeout", "100")
"""A member alone is there in a tenth of a second so, and grants leases of a second."""

UNHURRIED = ("--heartbeat-interval", "50", "--election-timeout", "500")
"""For members that wait for each other on a machine that does more than this."""


class EtcdProcess:
    """etcd, at `endpoint`; its data is in a folder, and stays when it ends.

    Args:
        folder: empty, or of one that has ended.
        keys: of it and of whose clients it believes; without them it speaks no TLS.
        of_several: of its command line, where it is a member of several; it is not waited for then.
    """

    def __init__(
        self, folder: Path, keys: Keys | None = None, of_several: Sequence[str] = ()
    ) -> None:
        self._folder, self._keys, self._of_several = folder, keys, of_several
        self.endpoint = f"{HOST}:{free_port()}"
        self.start()

    def start(self, data: str = "data") -> None:
        """Starts it, with the data of before or, by another name, with none."""
        secure = self._keys is not None
        url = f"{'https' if secure else 'http'}://{self.endpoint}"
        urls = ["--listen-client-urls", url, "--advertise-client-urls", url]
        peers = self._of_several or ["--listen-peer-urls", f"http://{HOST}:0", *QUICK]
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                ["etcd", "--data-dir", self._folder / data, *urls, *peers, *self._tls()],
                stdout=log,
                stderr=log,
            )
        if not self._of_several:
            with ExitStack() as stack:
                stack.callback(self.end)
                until(self.answers)
                stack.pop_all()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def client(self) -> Etcd:
        keys = self._keys
        if keys is None:
            return Etcd([self.endpoint])
        return Etcd([self.endpoint], ca=keys.ca, cert=keys.cert, key=keys.key)

    def _tls(self) -> list[str]:
        if self._keys is None:
            return []
        files = {
            "--cert-file": self._keys.cert,
            "--key-file": self._keys.key,
            "--trusted-ca-file": self._keys.ca,
        }
        return ["--client-cert-auth", *(str(part) for pair in files.items() for part in pair)]

    def answers(self) -> bool:
        """Returns whether it does, by a majority."""
        assert self._process.poll() is None, (self._folder / "log").read_text()
        with closing(self.client()) as client:
            try:
                client.get("/")
            except Away:
                return False
        return True


def start_members(folder: Path, count: int) -> list[EtcdProcess]:
    """Starts one etcd of several members; it answers when they have found each other."""
    urls = {f"etcd-{number}": f"http://{HOST}:{free_port()}" for number in range(count)}
    cluster = ["--initial-cluster", ",".join(f"{name}={url}" for name, url in urls.items())]
    members = []
    for name, url in urls.items():
        (folder / name).mkdir()
        peer = ["--listen-peer-urls", url, "--initial-advertise-peer-urls", url]
        told = ["--name", name, *peer, *cluster, *UNHURRIED]
        members.append(EtcdProcess(folder / name, of_several=told))
    return members


def free_port() -> int:
    with closing(socket.create_server((HOST, 0))) as listener:
        return int(listener.getsockname()[1])
