# SPDX-License-Identifier: Apache-2.0
"""The command line of ./scripts/vm."""

from __future__ import annotations

import os
import shutil
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import click

from guests.boot import boot
from guests.errors import GuestError
from guests.guest import Guest, Process
from guests.kernels import Kernel
from guests.topology import Emulator, Kind, Topology


class Size(click.ParamType[int]):
    """A size in MiB, written as 512M or 2G."""

    name = "size"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        factor = {"M": 1, "G": 1024}.get(value[-1:].upper())
        if factor is None or not value[:-1].isdigit():
            self.fail(f"{value!r} is not a size such as 512M or 2G", param, ctx)
        return int(value[:-1]) * factor


@click.command()
@click.option("--cxl", type=Size(), multiple=True, help="A CXL device; twice for two of them.")
@click.option("--interleaved", is_flag=True, help="Make one region of both CXL devices.")
@click.option("--slow-node", type=Size(), help="A lower memory tier at the speed of DRAM.")
@click.option("--numa", type=Size(), help="A second node without CPUs, in the same tier.")
@click.option("--memory", type=Size(), default="2G", show_default=True, help="The first node.")
@click.option("--cpus", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--kernel", type=click.Choice([*map(str, Kernel)]), default="7.2", show_default=True)
@click.option(
    "--qemu",
    type=click.Choice([*map(str, Emulator)]),
    default="10",
    show_default=True,
    help="10 emulates each access to CXL memory, 11 maps it at the speed of DRAM.",
)
@click.option("--numa-balancing", is_flag=True, help="Leave the kernel's NUMA balancing on.")
@click.argument("command", nargs=-1)
def main(
    cxl: tuple[int, ...],
    interleaved: bool,
    slow_node: int | None,
    numa: int | None,
    memory: int,
    cpus: int,
    kernel: str,
    qemu: str,
    numa_balancing: bool,
    command: tuple[str, ...],
) -> None:
    """Runs COMMAND, or a shell, in an emulated machine on this one's root file system.

    The machine sees the host's files and keeps its own changes to itself. COMMAND runs as root in
    the repository; its exit status is that of this program, and 125 tells of a machine that did
    not come up or was lost.

    \b
    ./scripts/vm --cxl 512M -- numactl --hardware
    ./scripts/vm --slow-node 1G --memory 1G --kernel 6.12
    """
    given = {Kind.CXL: cxl, Kind.SLOW_NODE: slow_node, Kind.NUMA: numa}
    kinds = [kind for kind, size in given.items() if size]
    if len(kinds) > 1:
        raise click.UsageError(f"one of --{' and --'.join(kinds)}, not both")
    try:
        topology = Topology(
            kind=kinds[0] if kinds else Kind.FLAT,
            memory_mib=memory,
            slow_mib=cxl or tuple(size for size in (slow_node, numa) if size),
            interleaved=interleaved,
            emulator=Emulator(qemu),
            cpus=cpus,
            numa_balancing=numa_balancing,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    sys.exit(_run(topology, Kernel(kernel), command))


def _run(topology: Topology, kernel: Kernel, command: tuple[str, ...]) -> int:
    try:
        with boot(topology, kernel) as guest:
            status = _interact(guest) if not command else guest.start(command).stream(_print)
    except GuestError as error:
        click.echo(f"vm: {error}", err=True)
        return 125
    except OSError as error:
        click.echo(f"vm: {command[0]}: {error.strerror}", err=True)
        return 127
    return status if status >= 0 else 128 - status


def _print(stream: str, data: bytes) -> None:
    output = sys.stdout if stream == "stdout" else sys.stderr
    output.buffer.write(data)
    output.flush()


def _interact(guest: Guest) -> int:
    """A shell on our terminal."""
    if not sys.stdin.isatty():
        raise click.UsageError("a shell needs a terminal; give a COMMAND")
    columns, rows = shutil.get_terminal_size()
    environment = {"TERM": os.environ.get("TERM", "dumb")}
    with _raw_terminal():
        shell = guest.start(["bash", "-i"], env=environment, terminal=(rows, columns))
        threading.Thread(target=_type, args=(shell,), daemon=True).start()
        return shell.stream(_print)


def _type(shell: Process) -> None:
    while data := os.read(sys.stdin.fileno(), 1024):
        shell.type(data)


@contextmanager
def _raw_terminal() -> Iterator[None]:
    saved = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


if __name__ == "__main__":
    main(prog_name="vm")
