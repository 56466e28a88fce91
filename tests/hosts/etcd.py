# SPDX-License-Identifier: Apache-2.0
"""A real etcd of one member, on loopback, that can be stopped, killed and started again."""

import signal
import socket
import subprocess
from contextlib import closing
from pathlib import Path

from sweeps.donors import HOST

from tests.unit.test_leases import until
from tierd.remote.etcd import Away, Etcd
from tierd.remote.wire import Keys

QUICK = ("--heartbeat-interval", "10", "--election-timeout", "100")
"""A member alone is there in a tenth of a second so, and grants leases of a second."""


class EtcdProcess:
    """etcd, at `endpoint`; its data is in a folder, and stays when it ends.

    Args:
        folder: empty, or of one that has ended.
        keys: of it and of whose clients it believes; without them it speaks no TLS.
    """

    def __init__(self, folder: Path, keys: Keys | None = None) -> None:
        self._folder, self._keys = folder, keys
        with closing(socket.create_server((HOST, 0))) as listener:
            self.endpoint = f"{HOST}:{listener.getsockname()[1]}"
        self.start()

    def start(self, data: str = "data") -> None:
        """Starts it, with the data of before or, by another name, with none."""
        secure = self._keys is not None
        url = f"{'https' if secure else 'http'}://{self.endpoint}"
        urls = ["--listen-client-urls", url, "--advertise-client-urls", url]
        peers = ["--listen-peer-urls", f"http://{HOST}:0"]
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                ["etcd", "--data-dir", self._folder / data, *urls, *peers, *QUICK, *self._tls()],
                stdout=log,
                stderr=log,
            )
        until(self._answers)

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

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()
        with closing(self.client()) as client:
            try:
                client.get("/")
            except Away:
                return False
        return True
