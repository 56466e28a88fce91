# SPDX-License-Identifier: Apache-2.0
"""Boots guests: virtme-ng works out QEMU's command line, and QEMU runs as our own child.

The guest's root is the host's, read-only over 9p; what it writes there goes to an overlay in the
guest's memory. It boots straight into agent.py, and ends when that does. The kernel prints to the
console's log and nowhere else.

A guest may also be a Debian of its own, in which systemd runs the agent; see enter_debian.sh.
"""

from __future__ import annotations

import compileall
import dataclasses
import logging
import os
import queue
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from guests import accelerator, debian, emulators, kernels, topology
from guests.channel import Channel, ChannelClosed
from guests.counter import SOURCE as COUNTER
from guests.counter import Counter
from guests.debian import Debian
from guests.errors import GuestError, GuestLost
from guests.guest import REPOSITORY, Facts, Guest, why_lost
from guests.kernels import Kernel
from guests.qmp import Monitor
from guests.topology import Topology
from guests.workloads import compiled

BOOT_TIMEOUT_S = 240
"""An emulated guest is up within 20 s on an idle host; a busy one gets its time."""
PROBE_TIMEOUT_S = 30
"""Under KVM that works, a guest is up within 5 s."""
SETUP_TIMEOUT_S = 120

PORT = "tierd.agent"

KEPT_CONSOLES = 50

OVERLAYS = ("/etc", "/home", "/opt", "/root", "/srv", "/tmp", "/usr", "/var")
HIDDEN = ("/dev", "/proc", "/run", "/sys", "/var/cache", "/var/log", "/var/tmp")
"""Folders that virtme-ng covers with empty ones in the guest."""

KERNEL_OPTIONS = ("loglevel=4", "oops=panic")

ROOT_MOUNT = b"version=9p2000.L,trans=virtio,access=any,msize=524288"
"""How virtme-ng's initramfs mounts the root over 9p; 9p2000.L is what Linux takes by default."""
CACHED_ROOT_MOUNT = b"cache=loose,trans=virtio,access=any,msize=524288"
"""The same, but what was read once is kept, as the host changes nothing meanwhile: twice as fast a
start for a Python program (Documentation/filesystems/9p.rst)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All that a boot needs from the host."""

    topology: Topology
    kernel: kernels.Installed
    qemu: Path
    busybox: Path
    counter: Path | None
    """A plugin of QEMU's that counts instructions, where time goes by these."""
    debian: Path | None
    """A root of its own, None for the host's."""
    kvm: bool


@contextmanager
def boot(
    topology: Topology, kernel: Kernel = Kernel.LATEST, debian: Debian | None = None
) -> Iterator[Guest]:
    """A guest with that memory under that kernel, set up for use; down when the block ends.

    Args:
        topology: its memory.
        kernel: its kernel.
        debian: what it is, with systemd; None for the host's own root and the agent alone.

    Raises:
        GuestLost: it did not come up twice in a row; a boot that hangs is tried once more.
        GuestPanic: its kernel panicked.
        ArchiveError: what it is made of could not be fetched.
    """
    machine = prepare(topology, kernel, debian)
    console = console_log(f"{topology.name}-{machine.kernel.release}")
    try:
        with _up(machine, console) as guest:
            yield guest
            return
    except BootHung as hung:
        log.warning("%s; booting again", hung)
    with _up(machine, console) as guest:
        yield guest


class BootHung(GuestLost):
    """The guest did not come up in time."""


def prepare(topology: Topology, kernel: Kernel, wanted: Debian | None = None) -> Machine:
    """Fetches what is missing, and finds out about KVM."""
    _check_visible(REPOSITORY, "the repository")
    for programs in ("tierd", "tests/vm"):  # or each guest compiles them, and keeps that to itself
        compileall.compile_dir(REPOSITORY / programs, quiet=1)
    machine = Machine(
        topology=topology,
        kernel=kernels.fetch(kernel),
        qemu=emulators.fetch(topology.emulator),
        busybox=emulators.fetch_busybox(),
        counter=compiled(COUNTER, "-shared", "-fPIC") if topology.counted else None,
        debian=None if wanted is None else debian.fetch(wanted),
        kvm=False,
    )
    _check_visible(machine.kernel.image, "the cache (see $TIERD_CACHE)")
    return dataclasses.replace(machine, kvm=accelerator.kvm_works(lambda: _boots_on_kvm(machine)))


def console_log(name: str) -> Path:
    """A file for a console, which outlives the guest."""
    folder = REPOSITORY / ".out" / "consoles"
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # another boot is at it
        for old in sorted(folder.iterdir(), key=lambda log: log.stat().st_mtime)[:-KEPT_CONSOLES]:
            old.unlink()
    return folder / f"{name}-{time.strftime('%H%M%S')}-{threading.get_native_id()}.log"


@contextmanager
def _up(machine: Machine, console: Path) -> Iterator[Guest]:
    start = time.monotonic()
    with _emulating(machine, console) as (emulator, channel, monitor, counter):
        _wait_ready(machine, emulator, channel, console, BOOT_TIMEOUT_S)
        guest = Guest(machine.topology, emulator, channel, monitor, counter, console)
        facts = _set_up(guest, machine)
        guest.facts = dataclasses.replace(facts, up_after_s=time.monotonic() - start)
        yield guest


def _boots_on_kvm(machine: Machine) -> bool:
    probe = dataclasses.replace(machine, topology=topology.flat(), debian=None, kvm=True)
    console = console_log("kvm-probe")
    with _emulating(probe, console) as (emulator, channel, *_):
        try:
            _wait_ready(probe, emulator, channel, console, PROBE_TIMEOUT_S)
        except GuestError:
            return False
        return True


def _wait_ready(
    machine: Machine,
    emulator: subprocess.Popen[bytes],
    channel: Channel,
    console: Path,
    timeout: float,
) -> None:
    name = machine.topology.name
    try:
        channel.wait_ready(timeout)
    except ChannelClosed:
        raise why_lost(name, emulator.wait(), console, kvm=machine.kvm) from None
    except queue.Empty:
        raise BootHung(f"guest {name} was not up after {timeout} s", console) from None


@contextmanager
def _emulating(
    machine: Machine, console: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Channel, Monitor, Counter]]:
    """QEMU runs inside the block, its ends of the two the guest's port and its own monitor."""
    ours, theirs = socket.socketpair()
    commands, monitor = socket.socketpair()
    with tempfile.TemporaryDirectory(prefix="tierd-vm-") as scratch:
        with theirs, monitor:
            descriptors = theirs.fileno(), monitor.fileno()
            counter = Counter(Path(scratch))
            command = _command(machine, Path(scratch), counter, *descriptors)
            emulator = _start(command, descriptors, console)
        channel, asked = Channel(ours), Monitor(commands)
        try:
            yield emulator, channel, asked, counter
        finally:
            # Nothing in a guest is worth an orderly shutdown.
            emulator.kill()
            emulator.wait()
            channel.close()
            asked.close()


def _start(
    command: list[str], descriptors: tuple[int, ...], console: Path
) -> subprocess.Popen[bytes]:
    # setpriv: if we are killed, so is QEMU. It keeps the session: between sessions CPUs are shared
    # evenly, whatever is nicer (sched_autogroup).
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    with console.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            process_group=0,
        )


def _command(
    machine: Machine, scratch: Path, counter: Counter, port: int, monitor: int
) -> list[str]:
    """QEMU's command line, as virtme-ng would run it, with its ends of those two sockets."""
    initramfs = scratch / "initramfs"
    virtme: list[str | Path] = [
        _beside_python("virtme-run"),
        *("--kimg", machine.kernel.image, "--mods", "auto"),
        *("--qemu-bin", machine.qemu, "--busybox", machine.busybox),
        *("--name", "tierd-guest"),
        *("--force-9p", "--disable-microvm", "--disable-kvm", "--show-boot-console"),
        *(f"--overlay-rwdir={folder}" for folder in _overlays()),
        *(f"--kopt={option}" for option in KERNEL_OPTIONS),
        *("--script-sh", _agent_command()),
        *("--save-initramfs", initramfs),
        *("--dry-run", "--show-command"),
    ]
    shown = subprocess.run(
        virtme,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if shown.returncode != 0:
        raise GuestError(f"virtme-run: {shown.stderr or shown.stdout}")
    _cache_root(initramfs)
    command = shlex.split(shown.stdout.splitlines()[-1])
    if machine.debian is not None:
        append = command.index("-append") + 1
        command[append] = _into_debian(command[append], machine.debian, machine.kernel)
    return [
        *command,
        *accelerator.arguments(kvm=machine.kvm, counted=machine.topology.counted),
        *(counter.arguments(machine.counter) if machine.counter and not machine.kvm else ()),
        *("-chardev", f"socket,id=monitor,fd={monitor}"),
        *("-mon", "chardev=monitor,mode=control"),
        *("-chardev", f"socket,id=agent,fd={port}"),
        *("-device", "virtio-serial-pci"),
        *("-device", f"virtserialport,chardev=agent,name={PORT}"),
        # Last, as QEMU would plug later devices into a CXL host bridge.
        *machine.topology.arguments(),
    ]


def _cache_root(initramfs: Path) -> None:
    """Changes the mount's options where they stand; the archive around them keeps its lengths."""
    content = initramfs.read_bytes()
    if content.count(ROOT_MOUNT) != 1:
        raise GuestError(f"virtme-run: its initramfs does not mount the root with {ROOT_MOUNT!r}")
    cached = CACHED_ROOT_MOUNT.ljust(len(ROOT_MOUNT))
    initramfs.write_bytes(content.replace(ROOT_MOUNT, cached))


DEBIAN_OPTIONS = (
    "systemd.unit=agent.service",
    # Nothing of a first boot, and no caches rebuilt.
    "systemd.machine_id=74696572640000000000000000000000",
    "systemd.condition-needs-update=no",
)


def _into_debian(options: str, tree: Path, kernel: kernels.Installed) -> str:
    """The kernel's options, with systemd in that tree in place of virtme-ng's init."""
    enter = Path(__file__).with_name("enter_debian.sh")
    init = f"init={enter} -- {tree} {REPOSITORY} {kernel.modules} {PORT}"
    others, found = re.subn(r"(^| )init=\S+$", "", options)
    if not found:
        raise GuestError(f"virtme-run: no init= at the end of {options!r}")
    return " ".join([others, *DEBIAN_OPTIONS, init])


def _agent_command() -> str:
    agent = Path(__file__).with_name("agent.py")
    # -S and -E spare the import of site-packages over 9p.
    return shlex.join([_python(), "-S", "-E", str(agent), f"/dev/virtio-ports/{PORT}"])


def _python() -> str:
    """The interpreter itself, without the virtual environment around it."""
    return str(Path(sys.executable).resolve())


def _beside_python(program: str) -> Path:
    """A program of the virtual environment that we run in."""
    found = Path(sys.prefix) / "bin" / program
    if not found.exists():
        raise GuestError(f"{found} is missing: run ./scripts/setup vm and use .venv/bin/python")
    return found


def _overlays() -> list[str]:
    folders = [folder for folder in OVERLAYS if Path(folder).is_dir()]
    inside = any(REPOSITORY.is_relative_to(folder) for folder in folders)
    return folders if inside else [*folders, str(REPOSITORY)]


def _check_visible(path: Path, what: str) -> None:
    for folder in HIDDEN:
        if path.is_relative_to(folder):
            raise GuestError(f"{what} is below {folder}, which guests don't see: move it elsewhere")


def _set_up(guest: Guest, machine: Machine) -> Facts:
    """Lets provision.py bring the memory online in the guest, and takes its report."""
    script = Path(__file__).with_name("provision.py")
    python = _python() if machine.debian is None else "/usr/bin/python3"
    done = guest.run(
        [python, "-S", "-E", script, *machine.topology.provisioning()], timeout=SETUP_TIMEOUT_S
    )
    release, fast, slow = done.stdout.splitlines()
    return Facts(
        release=release,
        fast=tuple(map(int, fast.split())),
        slow=tuple(map(int, slow.split())),
        kvm=machine.kvm,
        up_after_s=0,
    )
