# SPDX-License-Identifier: Apache-2.0
"""`tierd-donor`: lends memory of this host."""

import logging
import socket
import threading
import time
from pathlib import Path

import click

from tierd import __version__
from tierd.cli.daemon import log_from
from tierd.cli.errors import Commands
from tierd.cli.options import SIZE
from tierd.errors import TierdError
from tierd.kernel.nixl import load_nixl
from tierd.kernel.signals import caught_signals
from tierd.model import NodeId
from tierd.remote.donor import Donor, take_memory
from tierd.remote.link import PORT, split_address
from tierd.remote.registry import LEASE_S, Record, advertised, registered
from tierd.remote.wire import Keys

log = logging.getLogger("tierd")

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_LOOK_S = 0.2


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tierd-donor")
def main() -> None:
    """Lends this host's memory to other hosts."""


@main.command()
@click.option("--lend", "lend_bytes", type=SIZE, required=True, help="So much, taken at once.")
@click.option(
    "--reserve",
    "reserve_bytes",
    type=SIZE,
    default="1G",
    show_default=True,
    help="Has to be free besides on these nodes.",
)
@click.option("--node", "nodes", type=int, multiple=True, help="Of this node; by default of all.")
@click.option(
    "--listen",
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
    with caught_signals() as signals, _listener(listen) as listener:
        memory = take_memory(lend_bytes, reserve_bytes, [NodeId(node) for node in nodes])
        donor = Donor(memory, listener, keys, allow)
        serving = threading.Thread(target=donor.serve, name="donor")
        serving.start()
        host, port = listener.getsockname()[:2]
        log.info("%d MiB are lent at %s:%d", len(memory) >> 20, host, port)
        try:
            at = advertised(advertise, port) if etcd else ""
            files = {"ca": etcd_ca, "cert": etcd_cert, "key": etcd_key}
            with registered(etcd, name, lambda: _record(donor, at), lease_s=lease_s, **files):
                while not signals.stop_asked(3600.0, {}):
                    pass
            donor.leaves = True
            until_s = time.monotonic() + grace_s
            while donor.borrowers and time.monotonic() < until_s:
                time.sleep(_LOOK_S)
        finally:
            donor.stop()
            serving.join()


def _record(donor: Donor, address: str) -> Record:
    return Record(
        id=donor.id, address=address, lent_bytes=donor.lent_bytes, free_bytes=donor.free_bytes
    )


def _listener(address: str) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise TierdError(f"{address}: {error.strerror}") from error
