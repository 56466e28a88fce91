# SPDX-License-Identifier: Apache-2.0
"""Donors on this machine, each a process: for ./scripts/demo --remote, the bench and the tests.

Blocks go by TCP on loopback, as between hosts: within one, UCX would take shared memory.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import trustme

from tierd.errors import TierdError
from tierd.remote.link import split_address
from tierd.remote.wire import Keys

HOST = "127.0.0.1"
BY_TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
"""Of the environment, at both ends."""

_RUN = "from tierd.cli.donor import main; main()"


def make_keys(folder: Path, ca: trustme.CA, name: str, host: str = HOST) -> Keys:
    """Writes a certificate for a host, with a common name, and who has signed it."""
    keys = Keys(ca=folder / "ca.pem", cert=folder / f"{name}.pem", key=folder / f"{name}.key")
    issued = ca.issue_cert(host, common_name=name)
    ca.cert_pem.write_to_path(str(keys.ca))
    issued.cert_chain_pems[0].write_to_path(str(keys.cert))
    issued.private_key_pem.write_to_path(str(keys.key))
    return keys


class DonorProcess:
    """`tierd-donor run`: at `address`, with sockets in `runtime_dir`; `said` is what it logs.

    Args:
        keys: its own.
        lent_mib: what it lends; nothing is kept for the host.
        more: of its command line.
        host: where it listens.
        port: any that is free by default.
        prefix: what runs it elsewhere, such as in a network namespace.
        by: of its environment: how UCX reaches it.

    Raises:
        TierdError: it has ended at once, with what it said.
    """

    def __init__(
        self,
        keys: Keys,
        lent_mib: int,
        *more: str,
        host: str = HOST,
        port: int = 0,
        prefix: Sequence[str] = (),
        by: Mapping[str, str] = BY_TCP,
    ) -> None:
        files = ["--ca", str(keys.ca), "--cert", str(keys.cert), "--key", str(keys.key)]
        sizes = ["--lend", f"{lent_mib}M", "--reserve", "0", "--listen", f"{host}:{port}"]
        self._folder = TemporaryDirectory()
        self.runtime_dir = Path(self._folder.name)
        sockets = ["--config", os.devnull, "--runtime-dir", str(self.runtime_dir)]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", _RUN, "run", *sizes, *files, *sockets, *more],
            env={**os.environ, **by},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.said: list[str] = []
        found = None
        while found is None and (line := self.process.stderr.readline()):
            self.said.append(line)
            found = re.search(r"MiB are lent at (\S+)", line)
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()
        if found is None:
            self.end()
            raise TierdError("".join(self.said))
        self.address = found[1]

    @property
    def port(self) -> int:
        return split_address(self.address)[1]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Kills it, if it is there still."""
        self.process.kill()
        self.process.wait()
        self._listening.join()
        self._folder.cleanup()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            self.said.extend(self.process.stderr)
