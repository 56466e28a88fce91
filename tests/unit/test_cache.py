# SPDX-License-Identifier: Apache-2.0
"""Page cache that is asked to make way, in the tree of a real guest with a kernel that answers."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit import trees
from tierd.arbiter import Arbiter
from tierd.config import Rival
from tierd.discover.topology import discover
from tierd.errors import TierdError, UnsupportedKernel
from tierd.held import Held
from tierd.journal import Journal
from tierd.kernel import numa_balancing, page_cache
from tierd.kernel.nodes import read_inactive_cache
from tierd.kernel.text import UnexpectedContent
from tierd.kernel.tunable import KernelFiles
from tierd.kernel.vmstat import read_vmstat
from tierd.migrate.cache import Cache
from tierd.model import PAGE_BYTES, NodeId, Policy, Topology

FAST, SLOW = "sys/devices/system/node/node0", "sys/devices/system/node/node1"
RECLAIM = f"{FAST}/reclaim"
POLICY = Policy(long_s=60.0, retry_s=10.0, retry_most_s=30.0)
MIB = 1 << 20
INACTIVE = 600 * MIB
INTERVAL_S = 2.0
PART = INACTIVE * INTERVAL_S / POLICY.long_s
"""A round's, at which the last of it goes after `long_s`."""


class Kernel(KernelFiles):
    """A kernel that demotes what it is asked to, but for no more than `most_pages` in all."""

    def __init__(self, root: Path) -> None:
        self.root, self.most_pages, self.asked = root, 1 << 40, list[str]()
        self.answers = errno.EAGAIN
        self.may_begin = threading.Event()
        self.may_begin.set()

    def write(self, path: Path, value: str) -> None:
        assert path == self.root / RECLAIM
        assert self.may_begin.wait(10)
        assert (self.root / numa_balancing.DEMOTES).read_text().strip() == numa_balancing.YES
        self.asked.append(value)
        wanted = int(value.removesuffix("K swappiness=0")) * 1024 // PAGE_BYTES
        done = min(wanted, self.most_pages)
        self.most_pages -= done
        counted = self.root / FAST / "vmstat"
        before = demoted_pages(self.root)
        content = counted.read_text()
        counted.write_text(
            content.replace(f"pgdemote_proactive {before}", f"pgdemote_proactive {before + done}")
        )
        if done < wanted:
            raise OSError(self.answers, os.strerror(self.answers), str(path))


def demoted_pages(root: Path) -> int:
    return read_vmstat(root, NodeId(0)).pgdemote_proactive or 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = trees.unpack("slow-node-7.2", tmp_path)
    for node in (FAST, SLOW):
        (root / node / "reclaim").write_text("")
    (root / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
    has_inactive(root, INACTIVE)
    return root


@pytest.fixture
def topology(root: Path) -> Topology:
    return discover((), root)


@pytest.fixture
def journal(root: Path) -> Iterator[Journal]:
    with Journal(root / "state", root=root) as journal:
        yield journal


@pytest.fixture
def kernel(root: Path) -> Kernel:
    return Kernel(root)


@pytest.fixture
def held(root: Path, journal: Journal) -> Held:
    return Held(journal, root)


@pytest.fixture
def cache(held: Held, kernel: Kernel) -> Iterator[Cache]:
    with Cache(held, kernel) as cache:
        yield cache


def has_inactive(root: Path, size_bytes: int) -> None:
    path = root / FAST / "meminfo"
    now_bytes = read_inactive_cache(NodeId(0), root)
    line = "Inactive(file): {:8} kB"
    content = path.read_text()
    assert line.format(now_bytes >> 10) in content
    path.write_text(content.replace(line.format(now_bytes >> 10), line.format(size_bytes >> 10)))


def ask(
    cache: Cache, topology: Topology, lack: int, *, most: int = 1 << 40, now_s: float = 0.0
) -> None:
    """One round, and what it asked for is done."""
    cache.make_room(topology, (lack,), POLICY, interval_s=INTERVAL_S, most_bytes=most, now_s=now_s)
    cache.wait()


def demotes(root: Path) -> str:
    return (root / numa_balancing.DEMOTES).read_text().strip()


def in_kib(size_bytes: float) -> str:
    return f"{int(size_bytes) // PAGE_BYTES * PAGE_BYTES >> 10}K swappiness=0"


@pytest.mark.parametrize(
    ("lack", "most", "size"),
    [(MIB, 1 << 40, MIB), (8 * MIB, 3 * MIB, 3 * MIB), (1 << 40, 1 << 40, PART)],
    ids=["what is lacking", "within the budget", "what was not used for long_s"],
)
def test_so_much_is_asked_for(
    topology: Topology, cache: Cache, kernel: Kernel, lack: int, most: int, size: float
) -> None:
    cache.hold(True)
    ask(cache, topology, lack, most=most)
    assert kernel.asked == [in_kib(size)]
    ask(cache, topology, 0)
    assert cache.moved_pages == int(size) // PAGE_BYTES
    assert len(kernel.asked) == 1


@pytest.mark.parametrize(
    ("lack", "most", "inactive"),
    [(PAGE_BYTES, 1 << 40, INACTIVE), (MIB, PAGE_BYTES, INACTIVE), (MIB, 1 << 40, MIB)],
    ids=["hardly any lacking", "hardly any budget", "hardly any cache"],
)
def test_little_is_not_worth_asking(
    root: Path,
    topology: Topology,
    cache: Cache,
    kernel: Kernel,
    lack: int,
    most: int,
    inactive: int,
) -> None:
    has_inactive(root, inactive)
    cache.hold(True)
    ask(cache, topology, lack, most=most)
    assert not kernel.asked


def test_a_kernel_that_finds_little_is_left_alone_for_ever_longer(
    topology: Topology, cache: Cache, kernel: Kernel
) -> None:
    cache.hold(True)
    kernel.most_pages = 0
    asked_s = list[int]()
    for now_s in range(0, 100, 2):
        ask(cache, topology, MIB, now_s=now_s)
        if len(kernel.asked) > len(asked_s):
            asked_s.append(now_s)
    assert asked_s == [0, 12, 34, 66, 98], "10 s, 20 and 30, from when the answer is seen"
    ask(cache, topology, MIB, now_s=200)
    kernel.most_pages = 1 << 40
    for now_s in range(300, 310, 2):
        ask(cache, topology, MIB, now_s=now_s)
    assert len(kernel.asked) == len(asked_s) + 5
    assert cache.moved_pages == 4 * MIB // PAGE_BYTES


@pytest.mark.parametrize(
    ("answers", "is_told"), [(errno.EAGAIN, False), (errno.EBUSY, False), (errno.EROFS, True)]
)
def test_it_is_told_where_the_kernel_may_not_be_asked(
    topology: Topology,
    cache: Cache,
    kernel: Kernel,
    caplog: pytest.LogCaptureFixture,
    answers: int,
    is_told: bool,
) -> None:
    kernel.most_pages, kernel.answers = 0, answers
    cache.hold(True)
    ask(cache, topology, MIB)
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == is_told


def test_the_kernel_demotes_while_it_is_to_and_then_as_it_did(
    root: Path, cache: Cache, journal: Journal
) -> None:
    for wanted in (True, True, False, False, True):
        cache.hold(wanted)
        assert demotes(root) == ("true" if wanted else "false")
    assert len(journal.changes) == 1
    list(journal.undo())
    assert demotes(root) == "false"


@pytest.fixture
def asked_late(
    topology: Topology, cache: Cache, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for begins when it is waited for; the kernel asserts that it still demotes."""
    wait = cache.wait

    def begin_and_wait() -> None:
        kernel.may_begin.set()
        wait()

    monkeypatch.setattr(cache, "wait", begin_and_wait)
    kernel.may_begin.clear()
    cache.hold(True)
    cache.make_room(topology, (MIB,), POLICY, interval_s=INTERVAL_S, most_bytes=MIB, now_s=0)


@pytest.mark.usefixtures("asked_late")
def test_what_was_asked_for_is_done_before_the_kernel_would_drop_it(
    root: Path, topology: Topology, cache: Cache
) -> None:
    cache.hold(False)
    assert demotes(root) == "false"
    ask(cache, topology, 0)
    assert cache.moved_pages == MIB // PAGE_BYTES


@pytest.fixture
def arbiter(root: Path, held: Held) -> Arbiter:
    """One that has the kernel promote already, and demote."""
    (root / numa_balancing.PATH).write_text("0\n")
    (root / numa_balancing.LIMIT).write_text("65536\n")
    arbiter = Arbiter(held=held)
    arbiter.may_move(Rival.COOPERATE, moves=True)
    return arbiter


@pytest.mark.usefixtures("arbiter", "asked_late")
@pytest.mark.parametrize(("moves", "rests"), [(True, True), (False, False)])
def test_it_is_done_before_the_kernel_drops_it_where_it_promotes_too(
    root: Path, topology: Topology, arbiter: Arbiter, cache: Cache, moves: bool, rests: bool
) -> None:
    """The daemon asks the arbiter first, and then the cache."""
    arbiter.may_move(Rival.COOPERATE, moves=moves, rests=rests)
    assert demotes(root) == "true"
    cache.hold(False)
    assert demotes(root) == "false"
    ask(cache, topology, 0)
    assert cache.moved_pages == MIB // PAGE_BYTES


def test_the_kernel_demotes_on_where_page_cache_ends_first(
    root: Path, arbiter: Arbiter, cache: Cache, journal: Journal
) -> None:
    cache.hold(True)
    cache.hold(False)
    assert demotes(root) == "true"
    arbiter.may_move(Rival.COOPERATE, moves=True, rests=True)
    assert demotes(root) == "false"
    assert not journal.changes


def test_who_has_the_kernel_demote_himself_keeps_it(
    root: Path, cache: Cache, journal: Journal
) -> None:
    (root / numa_balancing.DEMOTES).write_text("true\n")
    cache.hold(True)
    cache.hold(False)
    assert not journal.changes
    assert demotes(root) == "true"


@pytest.mark.parametrize(
    ("nodes_reclaim", "may_write", "wanted"),
    [("0", True, "0"), ("1", True, "1"), ("0", False, "1")],
)
def test_however_little_there_is_goes_where_that_may_be_set(
    root: Path,
    cache: Cache,
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    nodes_reclaim: str,
    may_write: bool,
    wanted: str,
) -> None:
    """A unit finds it read-only, and where nodes reclaim by themselves it has another meaning."""
    least = root / page_cache.LEAST
    least.parent.mkdir(parents=True)
    least.write_text("1\n")
    (root / page_cache.NODES_RECLAIM).write_text(f"{nodes_reclaim}\n")
    monkeypatch.setattr(os, "access", lambda path, mode: may_write)
    for _ in range(2):
        cache.hold(True)
        assert (demotes(root), least.read_text().strip()) == ("true", wanted)
    cache.hold(False)
    assert (demotes(root), least.read_text().strip()) == ("false", "1")
    assert not journal.changes


def test_nothing_is_asked_where_the_kernel_would_drop_it(
    root: Path, topology: Topology, cache: Cache, kernel: Kernel
) -> None:
    ask(cache, topology, MIB)
    cache.hold(True)
    (root / numa_balancing.DEMOTES).write_text("false\n")  # by somebody else, in mid-round
    ask(cache, topology, MIB)
    assert not kernel.asked
    cache.hold(True)
    ask(cache, topology, MIB)
    assert len(kernel.asked) == 1


def test_a_kernel_that_cannot_is_refused(root: Path, topology: Topology, cache: Cache) -> None:
    cache.require(topology)
    (root / RECLAIM).unlink()
    with pytest.raises(UnsupportedKernel, match=r"that takes Linux 6\.17") as caught:
        cache.require(topology)
    assert "demote_cache" in (caught.value.hint or "")


def test_a_service_that_may_not_is_refused(
    topology: Topology, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(TierdError, match="node 0 cannot be demoted") as caught:
        cache.require(topology)
    assert "systemctl edit tierd" in (caught.value.hint or "")


def test_without_a_lower_tier_the_kernel_would_drop_it(tmp_path: Path, journal: Journal) -> None:
    flat = trees.unpack("numa", tmp_path / "numa")
    for node in flat.glob("sys/devices/system/node/node*"):
        (node / "reclaim").write_text("")
    with (
        Cache(Held(journal, flat)) as cache,
        pytest.raises(UnsupportedKernel, match="memory that it has as a lower tier"),
    ):
        cache.require(discover((), flat))


def test_a_node_that_has_gone_has_no_cache(
    root: Path, topology: Topology, cache: Cache, kernel: Kernel
) -> None:
    cache.hold(True)
    (root / FAST / "meminfo").unlink()
    (root / FAST / "vmstat").unlink()
    ask(cache, topology, MIB)
    assert read_inactive_cache(NodeId(0), root) == 0
    assert demoted_pages(root) == 0
    assert not kernel.asked


@pytest.mark.parametrize("content", ["", "Node 0 Inactive(file): many kB\n", "\0\xff"])
def test_an_unknown_form_is_told(root: Path, content: str) -> None:
    (root / FAST / "meminfo").write_text(content)
    with pytest.raises(UnexpectedContent, match=r"Inactive\(file\) in kB"):
        read_inactive_cache(NodeId(0), root)
