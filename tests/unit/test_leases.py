# SPDX-License-Identifier: Apache-2.0
"""Arenas that connect to the daemon's socket, and what connects and is none."""

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.drawer import Drawer
from tierd.api.server import unix_listener
from tierd.arena import Arena
from tierd.arena.shared import HEADER, Shared, SharedTier
from tierd.arena.steered import in_order
from tierd.arena.wire import (
    COMMAND,
    GIVE_BACK,
    HELLO,
    HELLO_BYTES,
    LIMIT,
    MAGIC,
    MOST_MBPS,
    VERSION,
    WELCOME,
    commands_in,
    limit_command,
    pack_hello,
)
from tierd.errors import TierdError
from tierd.kernel.arena import NOWHERE
from tierd.leases import Lease, Leases, Limits, leasing
from tierd.model import TierKind
from tierd.tiers import Tier
from tierd.tiers.memory import cxl, dram

BLOCK_BYTES, FAST, SLOW = 4096, 8, 32
LIMITS = Limits(arenas=3, blocks=1000)
WAIT_S = 20.0


def until(is_so: Callable[[], bool]) -> None:
    """Waits for what another thread or process does."""
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, "it did not come to that"
        time.sleep(0.002)


@pytest.fixture
def limits() -> Limits:
    return LIMITS


def a_shared(blocks: int = 12) -> Shared:
    told = SharedTier(name="dram", kind=TierKind.DRAM, slots=4)
    return Shared.create(4096, blocks, [told])


def connect(path: Path) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(WAIT_S)
    channel.connect(str(path))
    return channel


def say(path: Path, message: bytes, fds: list[int]) -> tuple[socket.socket, bytes]:
    channel = connect(path)
    socket.send_fds(channel, [message], fds)
    return channel, channel.recv(1024)


def an_arena(path: Path) -> Arena:
    tiers = [dram(FAST * BLOCK_BYTES), cxl(SLOW * BLOCK_BYTES)]
    return Arena(BLOCK_BYTES, tiers, daemon=path, name="kv")


def the_lease(leases: Leases) -> Lease:
    until(lambda: len(leases.all()) == 1)
    return leases.all()[0]


def commands(*wanted: tuple[int, int]) -> NDArray[np.void]:
    return np.array([*wanted], COMMAND)


def is_steered(arena: Arena) -> bool:
    return arena.steered is not None and arena.steered.by_daemon


def test_an_arena_is_read_and_steered(leases: Leases, path: Path) -> None:
    with an_arena(path) as arena:
        ids = np.arange(20)
        arena.write(ids, np.ones((20, BLOCK_BYTES), np.uint8))
        lease = the_lease(leases)
        assert (lease.name, lease.pid, lease.user_id) == ("kv", os.getpid(), os.getuid())
        counts, places = np.zeros(arena.blocks, np.uint32), np.zeros(arena.blocks, np.uint8)
        assert lease.copy(counts, places)
        assert counts[:20].tolist() == [1] * 20
        assert (places[:20] == arena.places(ids)).all()
        assert set(places[20:]) == {NOWHERE}
        far, near = ids[places[:20] == 1][0], ids[places[:20] == 0][0]
        assert lease.send(commands((near, 1), (far, 0), (10_000, 0), (0, 7))) == 4
        until(lambda: arena.places([near, far]).tolist() == [1, 0])
        until(lambda: arena.steered is not None and arena.steered.wrong == 2)
        assert arena.steered is not None
        assert arena.steered.commands == 2
    until(lambda: not leases.all())
    assert not lease.copy(counts, places)
    assert lease.send(commands((0, 1))) == 0
    assert not lease.is_behind()


def told_of(arena: Arena) -> tuple[int, int]:
    """How many commands have come, and how many that were none."""
    assert arena.steered is not None
    return arena.steered.commands, arena.steered.wrong


def test_what_is_free_is_left_to_others(leases: Leases, path: Path) -> None:
    with an_arena(path) as arena:
        lease = the_lease(leases)
        assert [tier.gives_back for tier in lease.copies.tiers] == [True, True]
        ids = np.arange(FAST + 4)
        arena.write(ids, np.ones((len(ids), BLOCK_BYTES), np.uint8))
        assert lease.send(commands((0, 1), (1, 1))) == 2
        until(lambda: (arena.places([0, 1]) == 1).all())
        assert lease.send(commands((GIVE_BACK, 0), (GIVE_BACK, 7), (2, 1), (GIVE_BACK, 1))) == 4
        until(lambda: arena.places([2])[0] == 1)
        until(lambda: arena.give_back("cxl") == 0)
        assert arena.give_back("dram") == BLOCK_BYTES, "but for the block that went since"
        until(lambda: told_of(arena) == (5, 1))
        assert (arena.read(ids) == 1).all()


def test_limits_are_the_lower_of_two_and_go_with_the_daemon(path: Path) -> None:
    tiers: list[Tier] = [dram(FAST * BLOCK_BYTES), Drawer(SLOW, BLOCK_BYTES)]
    with Arena(BLOCK_BYTES, tiers, daemon=path) as arena:
        with (
            unix_listener(path, 0o600, kind=socket.SOCK_SEQPACKET) as listener,
            leasing(listener, lambda: LIMITS) as leases,
        ):
            lease = the_lease(leases)
            for mbps in (40, MOST_MBPS):
                assert lease.send(limit_command(1, mbps)) == 1
                until(lambda mbps=mbps: arena.limits == {"drawer": mbps})  # type: ignore[misc]
            arena.limit("drawer", 50.5)
            assert arena.limits == {"drawer": 50.5}
            lease.send(limit_command(1, 40))
            until(lambda: arena.limits == {"drawer": 40})
            lease.send(limit_command(1, None))
            until(lambda: arena.limits == {"drawer": 50.5})
            lease.send(limit_command(7, 3))
            lease.send(limit_command(1, 7))
            until(lambda: told_of(arena) == (5, 1))
            assert arena.limits == {"drawer": 7}
        until(lambda: arena.limits == {"drawer": 50.5})


def test_commands_of_all_kinds_keep_their_order() -> None:
    limit = limit_command(1, 5)[0]
    told = commands((3, 1), (4, 1), limit, limit, (GIVE_BACK, 1), (GIVE_BACK, 0), (5, 0), (6, 1))
    runs = [(ids.tolist(), tier) for ids, tier in in_order(commands_in(told.tobytes(), 9, 2))]
    assert runs == [
        ([3, 4], 1),
        ([LIMIT, LIMIT], limit["tier"]),
        *(([GIVE_BACK], 1), ([GIVE_BACK], 0), ([5], 0), ([6], 1)),
    ]
    assert in_order(commands()) == []
    wrong = commands((9, 0), (0, 2), (GIVE_BACK, 2), (LIMIT, 2), (LIMIT, 5 << 8 | 255))
    assert len(commands_in(wrong.tobytes(), 9, 2)) == 0


def open_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


HELLOS = {
    "nothing": (b"", 1, b"not an arena's hello"),
    "magic": (b"tierdARN" + HELLO.pack(MAGIC, VERSION)[8:], 1, b"not an arena's hello"),
    "version": (HELLO.pack(MAGIC, 9) + b"kv", 1, b"version 9"),
    "cut": (pack_hello("kv")[:10], 1, b"not an arena's hello"),
    "long": (b"x" * (HELLO_BYTES + 1), 1, b"not an arena's hello"),
    "longer": (b"x" * 4096, 1, b"too long"),
    "name": (pack_hello("") + b"n" * 65, 1, b"name of more than"),
    "no fd": (pack_hello("kv"), 0, b"one file descriptor, and not 0"),
    "two fds": (pack_hello("kv"), 2, b"one file descriptor, and not 2"),
    "many fds": (pack_hello("kv"), 50, b"too many file descriptors"),
}


@pytest.mark.parametrize("what", HELLOS)
def test_a_hello_that_is_none(leases: Leases, path: Path, what: str) -> None:
    message, fds, why = HELLOS[what]
    shared = a_shared()
    before = open_fds()
    channel, answer = say(path, message, [shared.fd] * fds)
    if message or fds:
        assert answer.startswith(b"refused: ")
        assert why in answer
        assert channel.recv(10) == b""
    channel.close()
    until(lambda: leases.refused == 1)
    assert not leases.all()
    until(lambda: open_fds() == before)


def forged(size_bytes: int, *, sealed: bool = True, **wrong: object) -> int:
    """A memfd whose header differs so from an arena's."""
    shared = a_shared()
    header = np.frombuffer(os.pread(shared.fd, HEADER.itemsize, 0), HEADER).copy()
    for key, value in wrong.items():
        header[key] = value
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    os.pwrite(fd, header.tobytes()[:size_bytes], 0)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


MEMORIES: dict[str, tuple[Callable[[], int], bytes]] = {
    "unsealed": (lambda: forged(3 * 4096, sealed=False), b"not sealed"),
    "short": (lambda: forged(2 * 4096), b"8192 bytes of 12288"),
    "shorter": (lambda: forged(100), b"less than its header"),
    "magic": (lambda: forged(3 * 4096, magic=b"nothing"), b"begins otherwise"),
    "version": (lambda: forged(3 * 4096, version=7), b"version 7"),
    "blocks": (lambda: forged(3 * 4096, blocks=1 << 40), b"impossible size"),
    "tiers": (lambda: forged(3 * 4096, tiers=9), b"9 tiers"),
    "file": (lambda: os.open("/proc/self/stat", os.O_RDONLY), b"not an arena's memory"),
    "pipe": (lambda: os.pipe()[1], b"not an arena's memory"),
}


@pytest.mark.parametrize("what", MEMORIES)
def test_memory_that_is_no_arenas(leases: Leases, path: Path, what: str) -> None:
    make, why = MEMORIES[what]
    fd = make()
    channel, answer = say(path, pack_hello("kv"), [fd])
    os.close(fd)
    channel.close()
    assert answer.startswith(b"refused: ")
    assert why in answer
    assert not leases.all()


def test_no_more_arenas_and_blocks_than_one_may_have(leases: Leases, path: Path) -> None:
    shared = a_shared()
    channels = []
    for _ in range(LIMITS.arenas):
        channel, answer = say(path, pack_hello("kv"), [shared.fd])
        assert answer == WELCOME
        channels.append(channel)
    late, answer = say(path, pack_hello("kv"), [shared.fd])
    late.close()
    assert b"arena.max_arenas" in answer
    channels.pop().close()
    until(lambda: len(leases.all()) == LIMITS.arenas - 1)
    large = a_shared(LIMITS.blocks - 12)
    late, answer = say(path, pack_hello("kv"), [large.fd])
    late.close()
    assert b"arena.max_blocks" in answer
    for channel in channels:
        channel.close()


def test_who_says_nothing_is_dropped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierd.leases.HELLO_S", 0.05)
    with (
        unix_listener(path, 0o600, kind=socket.SOCK_SEQPACKET) as listener,
        leasing(listener, lambda: LIMITS) as leases,
    ):
        channel = connect(path)
        assert b"has not said hello" in channel.recv(1024)
        assert channel.recv(10) == b""
        assert leases.refused == 1
        channel.close()


def test_of_many_that_say_nothing_the_oldest_go(
    leases: Leases, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd.leases.MOST_WAITING", 4)
    channels = [connect(path) for _ in range(6)]
    assert channels[0].recv(10) == b""
    assert channels[1].recv(10) == b""
    shared = a_shared()
    socket.send_fds(channels[5], [pack_hello("kv")], [shared.fd])
    assert channels[5].recv(100) == WELCOME
    for channel in channels:
        channel.close()


def test_who_says_more_is_dropped(leases: Leases, path: Path) -> None:
    shared = a_shared()
    channel, answer = say(path, pack_hello("kv"), [shared.fd])
    assert answer == WELCOME
    channel.send(b"more")
    with suppress(ConnectionResetError):
        assert channel.recv(10) == b""
    until(lambda: not leases.all())
    channel.close()


def test_who_never_reads_stalls_nobody(leases: Leases, path: Path) -> None:
    shared = a_shared()
    channel, _ = say(path, pack_hello("kv"), [shared.fd])
    lease = the_lease(leases)
    assert not lease.is_behind()
    wanted = np.zeros(1 << 20, COMMAND)
    sent = lease.send(wanted)
    assert 0 < sent < len(wanted)
    assert lease.is_behind()
    assert lease.send(wanted) == 0
    channel.close()
    until(lambda: lease.is_over)


def test_a_name_is_printable(leases: Leases, path: Path) -> None:
    shared = a_shared()
    channel, _ = say(path, pack_hello("a\n\x1b[2Jb"), [shared.fd])
    assert the_lease(leases).name == "a??[2Jb"
    channel.close()


PROGRAM = """
import os, sys
import numpy as np
from tierd.arena import Arena
from tierd.tiers.memory import dram
arena = Arena(4096, [dram(8 * 4096)], daemon=sys.argv[1], name="other")
arena.write([0, 1], np.ones((2, 4096), np.uint8))
if "fork" in sys.argv:
    import time
    while not arena.steered.by_daemon:
        time.sleep(0.001)
    if os.fork() == 0:
        assert arena.steered.why_not == "the arena is the parent's", arena.steered
        os.write(1, b"child\\n")
        sys.stdin.read()
        os._exit(0)
os.write(1, b"ready\\n")
sys.stdin.read()
"""


def program(path: Path, *more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(path), *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_program_leaves_nothing(leases: Leases, path: Path, *, forks: bool) -> None:
    """Not even where a child of it lives on."""
    with program(path, *["fork"] * forks) as other:
        lease = the_lease(leases)
        assert (lease.pid, lease.name) == (other.pid, "other")
        assert other.stdout is not None
        said = {other.stdout.readline() for _ in range(1 + forks)}
        assert said == ({"ready\n", "child\n"} if forks else {"ready\n"})
        other.kill()
        until(lambda: not leases.all())
        assert other.stdin is not None
        other.stdin.close()


def test_a_daemon_that_goes_and_comes_again(path: Path) -> None:
    with an_arena(path) as arena:
        arena.write([3], np.ones((1, BLOCK_BYTES), np.uint8))
        for _ in range(2):
            with (
                unix_listener(path, 0o600, kind=socket.SOCK_SEQPACKET) as listener,
                leasing(listener, lambda: LIMITS) as leases,
            ):
                until(lambda: is_steered(arena))
                assert the_lease(leases).send(commands((3, 1))) == 1
                until(lambda: arena.places([3]).tolist() == [1])
            until(lambda: not is_steered(arena))
            arena.prefetch([3])
            arena.wait([3])
            assert (arena.read([3]) == 1).all()
        assert arena.steered is not None
        assert arena.steered.why_not


def test_an_arena_without_a_daemon_says_why(path: Path) -> None:
    with an_arena(path) as arena:
        until(lambda: "No such file" in str(arena.steered))
        with pytest.raises(TierdError, match="connected to a daemon already"):
            arena.connect(path)
    with pytest.raises(TierdError, match="closed"):
        arena.connect(path)
    assert arena.steered is not None
    assert arena.steered.why_not == "the arena is closed"


def test_a_refused_arena_says_why(leases: Leases, path: Path) -> None:
    with Arena(64, [dram(64 * 2000)], daemon=path) as arena:
        until(lambda: "arena.max_blocks" in str(arena.steered))
        assert not is_steered(arena)
