# SPDX-License-Identifier: Apache-2.0
"""`tierd-donor`: lends memory of this host."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import click

from tierd.api.app import App
from tierd.api.endpoints import serving_api
from tierd.api.lending import OPERATIONS, Lending
from tierd.api.sockets import DONOR
from tierd.cli.daemon import log_from
from tierd.cli.errors import Commands
from tierd.cli.option_file import file_option, require_all
from tierd.cli.options import SIZE, runtime_dir_option
from tierd.errors import TierdError
from tierd.kernel.nixl import load_nixl
from tierd.kernel.notify import notify
from tierd.kernel.signals import caught_signals
from tierd.model import NodeId
from tierd.remote.donor import KEEP_S, Donor, read_free, take_memory
from tierd.remote.link import PORT, join_address, split_address
from tierd.remote.registry import LEASE_S, Record, advertised, registered
from tierd.remote.wire import MOST_KEEP_S, Keys

log = logging.getLogger("tierd")

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_LOOK_S = 0.2
_END_S = 30.0
"""After the grace: what was lent is wiped."""

_CONFIG = Path("/etc/tierd/donor.toml")


class _Address(click.ParamType[str]):
    """As split_address() takes it."""

    name = "address"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            split_address(value)
        except TierdError as error:
            self.fail(f"{error}, {error.hint}", param, ctx)
        return value


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tierd", prog_name="tierd-donor")
def main() -> None:
    """Lends this host's memory to other hosts."""


@main.command()
@file_option(_CONFIG)
@click.option("--lend", "lend_bytes", type=SIZE, required=True, help="So much, taken at once.")
@click.option(
    "--reserve",
    "reserve_bytes",
    type=SIZE,
    default="1G",
    show_default=True,
    help="Has to be free besides on these nodes.",
)
@click.option(
    "--node",
    "nodes",
    type=click.IntRange(0, 1023),
    multiple=True,
    help="Of this node; by default of all.",
)
@click.option(
    "--listen",
    type=_Address(),
    default=f"0.0.0.0:{PORT}",
    show_default=True,
    metavar="HOST:PORT",
    help="Where borrowers come to.",
)
@click.option("--ca", type=_FILE, required=True, help="Who signs for borrowers, PEM.")
@click.option("--cert", type=_FILE, required=True, help="This host's certificate, PEM.")
@click.option("--key", type=_FILE, required=True, help="The key of it, PEM.")
@click.option("--allow", multiple=True, metavar="NAME", help="This borrower; by default all.")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="At the end, wait so many seconds for borrowers to move away.",
)
@click.option(
    "--keep",
    "keep_s",
    type=click.IntRange(1, MOST_KEEP_S),
    default=KEEP_S,
    show_default=True,
    help="Keep what a borrower has, so many seconds without a word of it.",
)
@runtime_dir_option("Have the sockets for tierctl donor")
@click.option(
    "--metrics-listen",
    type=_Address(),
    metavar="HOST:PORT",
    help="Tell /metrics, and nothing else, over TCP here too.",
)
@click.option("--etcd", multiple=True, metavar="HOST:PORT", help="Be registered in this etcd.")
@click.option("--name", default=socket.gethostname, help="As this; by default the host's name.")
@click.option("--advertise", metavar="HOST:PORT", help="At this; by default that name, and port.")
@click.option("--etcd-ca", type=_FILE, help="Who signs for etcd, PEM; without it there is no TLS.")
@click.option("--etcd-cert", type=_FILE, help="This host's certificate for etcd, PEM.")
@click.option("--etcd-key", type=_FILE, help="The key of it, PEM.")
@click.option(
    "--etcd-lease",
    "lease_s",
    type=click.IntRange(1, 3600),
    default=LEASE_S,
    show_default=True,
    help="Where this donor dies, etcd forgets it after so many seconds.",
)
def run(
    lend_bytes: int,
    reserve_bytes: int,
    nodes: tuple[int, ...],
    listen: str,
    ca: Path,
    cert: Path,
    key: Path,
    allow: tuple[str, ...],
    grace_s: float,
    keep_s: int,
    runtime_dir: Path,
    metrics_listen: str | None,
    etcd: tuple[str, ...],
    name: str,
    advertise: str | None,
    etcd_ca: Path | None,
    etcd_cert: Path | None,
    etcd_key: Path | None,
    lease_s: int,
) -> None:
    """Lends memory in the foreground, until SIGTERM or SIGINT."""
    log_from(logging.INFO)
    load_nixl()
    keys = Keys(ca=ca, cert=cert, key=key)
    with caught_signals() as signals, _listener(listen) as listener, ExitStack() as stack:
        chosen = [*read_free([NodeId(node) for node in nodes])]
        memory = take_memory(lend_bytes, reserve_bytes, chosen)
        donor = Donor(memory, listener, keys, allow, keep_s)
        host, port = listener.getsockname()[:2]
        address = join_address(host, port)
        lending = Lending(donor=donor, address=address, nodes=chosen, reserve_bytes=reserve_bytes)
        stack.enter_context(answering(lending, runtime_dir, metrics_listen))
        serving = threading.Thread(target=donor.serve, name="donor")
        serving.start()
        log.info("%d MiB are lent at %s", len(memory) >> 20, lending.address)
        notify("READY=1")
        try:
            at = advertised(advertise, port) if etcd else ""
            files = {"ca": etcd_ca, "cert": etcd_cert, "key": etcd_key}
            with registered(etcd, name, lambda: _record(donor, at), lease_s=lease_s, **files):
                while not signals.stop_asked(3600.0, {}):
                    pass
            notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int((grace_s + _END_S) * 1e6)}")
            donor.leaves = True
            until_s = time.monotonic() + grace_s
            while donor.borrowers and time.monotonic() < until_s:
                time.sleep(_LOOK_S)
        finally:
            donor.stop()
            serving.join()


@contextmanager
def answering(lending: Lending, runtime_dir: Path, metrics_listen: str | None) -> Iterator[None]:
    """Has tierctl donor and who collects metrics answered inside the block."""
    try:
        runtime_dir.mkdir(exist_ok=True)
    except OSError as error:
        raise TierdError(
            f"{runtime_dir}: {error.strerror}", hint="run it with sudo, or give --runtime-dir"
        ) from error
    app = partial(App, lending, lending, name=DONOR)
    with ExitStack() as stack:
        metrics = stack.enter_context(_listener(metrics_listen)) if metrics_listen else None
        stack.enter_context(serving_api(runtime_dir, app, OPERATIONS, metrics))
        yield


@main.command()
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    default=_CONFIG,
    show_default=True,
    help="This file.",
)
def check(path: Path) -> None:
    """Checks the configuration file, and the keys that it names."""
    values = require_all(run, path)
    Keys(**{name: values[name] for name in ("ca", "cert", "key")}).context(is_donor=True)
    click.echo(f"{path}: ok")


def _record(donor: Donor, address: str) -> Record:
    account = donor.account()
    return Record(
        id=donor.id,
        address=address,
        lent_bytes=account.capacity_bytes,
        free_bytes=0 if account.leaves else account.free_bytes,
    )


def _listener(address: str) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise TierdError(f"{address}: {error.strerror}") from error
