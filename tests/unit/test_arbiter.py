# SPDX-License-Identifier: Apache-2.0
"""What the daemon does where the kernel places pages itself."""

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierd.arbiter import Arbiter
from tierd.config import Rival
from tierd.decide.look import Look, Pace
from tierd.errors import Conflict, UnsupportedKernel
from tierd.held import Held
from tierd.journal import Journal
from tierd.kernel import numa_balancing, text
from tierd.kernel.tunable import KernelFiles

BY_ITSELF = ("1000", "60000")
"""How often the kernel looks, as in numa_balancing.LOOKS."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / numa_balancing.PATH).parent.mkdir(parents=True)
    (tmp_path / numa_balancing.DEMOTES).parent.mkdir(parents=True)
    (tmp_path / numa_balancing.DEMOTES).write_text("false\n")
    (tmp_path / numa_balancing.LIMIT).write_text("65536\n")
    (tmp_path / "proc/sys/kernel/random").mkdir()
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
    return tmp_path


@pytest.fixture
def journal(root: Path) -> Iterator[Journal]:
    with Journal(root / "state", root=root) as journal:
        yield journal


def mode(root: Path) -> str:
    return (root / numa_balancing.PATH).read_text().strip()


def tiering(root: Path) -> tuple[str, str, str]:
    """Mode, limit, and whether the kernel demotes."""
    limit, demotes = (
        (root / path).read_text().strip() for path in (numa_balancing.LIMIT, numa_balancing.DEMOTES)
    )
    return mode(root), limit, demotes


def write(root: Path, value: str) -> None:
    (root / numa_balancing.PATH).write_text(value)


@pytest.fixture
def arbiter(root: Path, journal: Journal) -> Arbiter:
    return Arbiter(held=Held(journal, root))


@pytest.mark.parametrize("wanted", [rival for rival in Rival if rival is not Rival.COOPERATE])
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("value", ["0", None])
def test_nothing_is_done_where_it_is_off_or_absent(
    root: Path,
    arbiter: Arbiter,
    journal: Journal,
    wanted: Rival,
    moves: bool,
    value: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if value is not None:
        write(root, value)
    assert arbiter.may_move(wanted, moves=moves) == moves
    assert not journal.changes
    assert not caplog.records


@pytest.mark.parametrize("wanted", Rival)
def test_who_only_observes_changes_nothing(
    root: Path, arbiter: Arbiter, journal: Journal, wanted: Rival
) -> None:
    write(root, "1")
    assert not arbiter.may_move(wanted, moves=False)
    assert mode(root) == "1"
    assert not journal.changes


def test_it_is_turned_off_and_put_back(root: Path, arbiter: Arbiter, journal: Journal) -> None:
    write(root, "3")
    assert arbiter.may_move(Rival.TAKE_OVER, moves=True)
    assert mode(root) == "0"
    assert arbiter.note is None
    list(journal.undo())
    assert mode(root) == "3"


@pytest.mark.parametrize(
    ("wanted", "moves"), [(Rival.TAKE_OVER, False), (Rival.IGNORE, True), (Rival.OBSERVE, True)]
)
def test_it_is_put_back_when_it_is_no_more_to_be_off(
    root: Path, arbiter: Arbiter, journal: Journal, wanted: Rival, moves: bool
) -> None:
    write(root, "1")
    arbiter.may_move(Rival.TAKE_OVER, moves=True)
    arbiter.may_move(wanted, moves=moves)
    assert mode(root) == "1"
    assert not journal.changes


def test_it_is_turned_off_again_and_again(root: Path, arbiter: Arbiter, journal: Journal) -> None:
    """As where another tool sets it now and then. One change is recorded, the last."""
    for value in ("1", "2", "1"):
        write(root, value)
        assert arbiter.may_move(Rival.TAKE_OVER, moves=True)
        assert mode(root) == "0"
        assert len(journal.changes) == 1
    list(journal.undo())
    assert mode(root) == "1"


def test_what_others_write_meanwhile_stays(root: Path, arbiter: Arbiter, journal: Journal) -> None:
    write(root, "1")
    arbiter.may_move(Rival.TAKE_OVER, moves=True)
    write(root, "2")
    list(journal.undo())
    assert mode(root) == "2"


def test_it_is_refused_with_the_next_step(root: Path, arbiter: Arbiter) -> None:
    write(root, "2")
    with pytest.raises(Conflict, match="is 2: the kernel promotes pages itself") as caught:
        arbiter.may_move(Rival.REFUSE, moves=True)
    assert "take_over" in (caught.value.hint or "")


@pytest.mark.parametrize(("wanted", "may_move"), [(Rival.OBSERVE, False), (Rival.IGNORE, True)])
def test_it_is_left_on_and_told_once(
    root: Path,
    arbiter: Arbiter,
    wanted: Rival,
    may_move: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(root, "1")
    with caplog.at_level(logging.WARNING, "tierd"):
        for _ in range(3):
            assert arbiter.may_move(wanted, moves=True) == may_move
    (record,) = caplog.records
    assert "the kernel moves pages to the CPUs that use them" in record.message
    assert record.message == arbiter.note
    assert mode(root) == "1"
    write(root, "0")
    assert arbiter.may_move(wanted, moves=True)
    assert arbiter.note is None


@pytest.mark.parametrize("before", ["0", "1"])
def test_from_cooperation_it_is_taken_over(
    root: Path, arbiter: Arbiter, journal: Journal, before: str
) -> None:
    write(root, before)
    as_it_was = tiering(root)
    arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=64)
    assert arbiter.may_move(Rival.TAKE_OVER, moves=True)
    assert tiering(root) == ("0", *as_it_was[1:])
    arbiter.may_move(Rival.IGNORE, moves=True)
    assert tiering(root) == as_it_was
    assert not journal.changes


@pytest.mark.parametrize(("before", "meanwhile"), [("0", "2"), ("1", "3"), ("2", "2")])
def test_it_is_turned_on_to_cooperate_and_put_back(
    root: Path, arbiter: Arbiter, journal: Journal, before: str, meanwhile: str
) -> None:
    write(root, before)
    for _ in range(2):
        assert arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=255.5)
        assert tiering(root) == (meanwhile, "256", "true")
        assert arbiter.cooperates
        assert arbiter.note is None
    list(journal.undo())
    assert tiering(root) == (before, "65536", "false")


@pytest.mark.parametrize("before", ["0", "1", "2"])
def test_where_nothing_is_left_to_sort_the_kernel_demotes_alone(
    root: Path, arbiter: Arbiter, before: str
) -> None:
    write(root, before)
    arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=64)
    for _ in range(2):
        assert arbiter.may_move(Rival.COOPERATE, moves=True, look=None, budget_mbps=64)
        assert tiering(root) == (before, "65536", "true")
        assert arbiter.cooperates, "what it has sorted stays as it is"
    arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=64)
    assert tiering(root) == (str(int(before) | 2), "64", "true")


def test_that_the_kernel_promotes_is_logged_as_it_begins(
    root: Path, arbiter: Arbiter, caplog: pytest.LogCaptureFixture
) -> None:
    """And not at each step of a look, of which the limit is another."""
    write(root, "0")
    with caplog.at_level(logging.INFO, "tierd"):
        for budget_mbps in (64, 50, 20):
            arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=budget_mbps)
    assert [record.message for record in caplog.records].count(
        "the kernel promotes single pages where it matters, and demotes"
    ) == 1


def test_a_limit_is_not_raised(root: Path, arbiter: Arbiter) -> None:
    write(root, "2")
    (root / numa_balancing.LIMIT).write_text("100\n")
    for budget_mbps, limit in ((200, "100"), (50, "50"), (80, "80"), (200, "100")):
        arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=budget_mbps)
        assert tiering(root) == ("2", limit, "true")


@pytest.fixture
def written(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were written, in order."""
    written = list[str]()
    write_file = KernelFiles.write

    def note(self: KernelFiles, path: Path, value: str) -> None:
        written.append(str(path.relative_to(root)))
        write_file(self, path, value)

    monkeypatch.setattr(KernelFiles, "write", note)
    return written


@pytest.fixture
def looks(root: Path) -> Callable[[], tuple[str, ...]]:
    """Tells the shortest period and the longest one, as in debugfs."""
    files = [root / path for path in numa_balancing.LOOKS[:2]]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for file, value in zip(files, BY_ITSELF, strict=True):
        file.write_text(f"{value}\n")
    return lambda: tuple(file.read_text().strip() for file in files)


def test_the_kernel_looks_often_while_it_sorts(
    root: Path, arbiter: Arbiter, journal: Journal, looks: Callable[[], tuple[str, ...]]
) -> None:
    write(root, "0")
    often = ("1000", "1000")
    for sorts, settings in ((True, often), (False, BY_ITSELF), (True, often)):
        arbiter.may_move(Rival.COOPERATE, moves=True, look=Look() if sorts else None)
        assert mode(root) == ("2" if sorts else "0")
        assert looks() == settings
    list(journal.undo())
    assert looks() == BY_ITSELF


@pytest.mark.parametrize(("pace", "shortest"), [(Pace.BY_ITSELF, "1000"), (Pace.SOON, "500")])
def test_after_a_first_look_the_next_one_may_come_soon(
    root: Path, arbiter: Arbiter, looks: Callable[[], tuple[str, ...]], pace: Pace, shortest: str
) -> None:
    """Without the kernel looking often, by which it would adapt what counts as hot."""
    write(root, "0")
    arbiter.may_move(Rival.COOPERATE, moves=True, look=Look(pace=pace))
    assert looks() == (shortest, "60000")


def test_a_look_begins_anew_as_soon_as_the_kernel_can(
    root: Path, arbiter: Arbiter, journal: Journal, looks: Callable[[], tuple[str, ...]]
) -> None:
    write(root, "0")
    at_once, often = (Pace.ANEW, ("100", "100")), (Pace.OFTEN, ("1000", "1000"))
    for pace, settings in (at_once, often, at_once):
        arbiter.may_move(Rival.COOPERATE, moves=True, look=Look(pace=pace))
        assert looks() == settings
    list(journal.undo())
    assert looks() == BY_ITSELF


def test_a_period_that_is_shorter_yet_is_kept(
    root: Path, arbiter: Arbiter, looks: Callable[[], tuple[str, ...]]
) -> None:
    write(root, "0")
    (root / numa_balancing.SHORTEST_LOOK).write_text("50\n")
    arbiter.may_move(Rival.COOPERATE, moves=True, look=Look(pace=Pace.ANEW))
    assert looks() == ("50", "50")


@pytest.mark.parametrize(
    ("by_itself", "at_once", "period"),
    [("256", "128", "50"), ("32", "32", "12"), ("0", "0", "100")],
)
def test_a_look_that_begins_anew_is_at_less_at_a_time(
    root: Path,
    arbiter: Arbiter,
    journal: Journal,
    looks: Callable[[], tuple[str, ...]],
    by_itself: str,
    at_once: str,
    period: str,
) -> None:
    """As much in a second, but sooner through with what no thread accesses."""
    write(root, "0")
    size = root / numa_balancing.AT_A_TIME
    size.write_text(f"{by_itself}\n")
    for pace, mib, periods in (
        (Pace.ANEW, at_once, (period, period)),
        (Pace.OFTEN, by_itself, ("1000", "1000")),
        (Pace.ANEW, at_once, (period, period)),
    ):
        arbiter.may_move(Rival.COOPERATE, moves=True, look=Look(pace=pace))
        assert size.read_text().strip() == mib
        assert looks() == periods
    list(journal.undo())
    assert size.read_text().strip() == by_itself


@pytest.mark.parametrize("missing", numa_balancing.LOOKS[:2])
def test_it_looks_as_it_does_where_debugfs_does_not_tell_all(
    root: Path, arbiter: Arbiter, looks: Callable[[], tuple[str, ...]], missing: str
) -> None:
    write(root, "0")
    (root / missing).unlink()
    arbiter.may_move(Rival.COOPERATE, moves=True, look=Look(pace=Pace.ANEW))
    (root / missing).write_text(BY_ITSELF[numa_balancing.LOOKS.index(missing)])
    assert looks() == BY_ITSELF


@pytest.fixture
def within(root: Path) -> Path:
    within = root / numa_balancing.HOT_WITHIN
    within.parent.mkdir(parents=True, exist_ok=True)
    within.write_text("1000\n")
    write(root, "0")
    return within


def test_the_first_look_takes_less_for_hot(
    root: Path, arbiter: Arbiter, journal: Journal, within: Path
) -> None:
    for first, milliseconds in ((True, "700"), (False, "1000"), (True, "700"), (True, "700")):
        arbiter.may_move(Rival.COOPERATE, moves=True, look=Look(first=first))
        assert within.read_text().strip() == milliseconds
    list(journal.undo())
    assert within.read_text().strip() == "1000"


def test_in_a_first_look_what_promotions_take_counts_besides(
    arbiter: Arbiter, looks: Callable[[], tuple[str, ...]], within: Path
) -> None:
    """The kernel adapts nothing meanwhile, as it would looking often."""
    for held_up_s, milliseconds in ((0.0, "1000"), (0.35, "1350"), (2.0, "3000"), (60.0, "4000")):
        look = Look(pace=Pace.BY_ITSELF, held_up_s=held_up_s)
        arbiter.may_move(Rival.COOPERATE, moves=True, look=look)
        assert within.read_text().strip() == milliseconds
        assert looks() == BY_ITSELF
    arbiter.may_move(Rival.COOPERATE, moves=True, look=Look())
    assert within.read_text().strip() == "1000"
    assert looks() == ("1000", "1000")


def test_a_first_look_for_hotter_memory_takes_less_for_hot(arbiter: Arbiter, within: Path) -> None:
    """Once samples tell; what promotions take counts besides, too."""
    for seen_s, held_up_s, share, milliseconds in (
        (0.3, 0.0, 0.0, "1000"),
        (0.5, 0.01, 0.0, "510"),
        (0.001, 0.01, 0.0, "510"),
        (0.001, 0.01, 0.5, "760"),
        (0.001, 0.01, 1.0, "1010"),
        (0.51, 0.01, 0.0, "1010"),
        (0.3, 0.35, 0.0, "850"),
        (0.3, 60.0, 0.0, "3500"),
        (2.0, 0.35, 1.0, "1350"),
        (2.1, 0.35, 1.0, "1850"),
        (60.0, 60.0, 1.0, "4000"),
        (math.inf, 0.35, 1.0, "1350"),
    ):
        look = Look(pace=Pace.BY_ITSELF, seen_s=seen_s, held_up_s=held_up_s, held_up_share=share)
        arbiter.may_move(Rival.COOPERATE, moves=True, look=look)
        assert within.read_text().strip() == milliseconds


def test_a_later_look_takes_for_hot_what_is_as_hot_as_what_it_is_for(
    arbiter: Arbiter, within: Path
) -> None:
    """It goes up to twice what it is told; a look for colder memory is as it was."""
    wanted = {30.0: "1000", 1.1: "1000", 1.0: "500", 0.3: "250", 0.25: "125", 0.001: "125"}
    for within_s, milliseconds in (*wanted.items(), (math.inf, "1000")):
        arbiter.may_move(Rival.COOPERATE, moves=True, look=Look(within_s=within_s))
        assert within.read_text().strip() == milliseconds


def test_for_a_first_look_the_kernel_forgets_what_it_has_adapted(
    arbiter: Arbiter, looks: Callable[[], tuple[str, ...]], within: Path, written: list[str]
) -> None:
    """By being turned on again; it demotes all the while."""
    often, by_itself = (Pace.OFTEN, ("1000", "1000")), (Pace.BY_ITSELF, BY_ITSELF)
    for pace, settings in (often, by_itself, by_itself):
        arbiter.may_move(Rival.COOPERATE, moves=True, look=Look(pace=pace))
        assert looks() == settings
    assert written.count(numa_balancing.PATH) == 3
    assert written.count(numa_balancing.DEMOTES) == 1


def test_before_samples_tell_that_counts_besides_less(arbiter: Arbiter, within: Path) -> None:
    look = Look(first=True, pace=Pace.BY_ITSELF, held_up_s=0.25)
    arbiter.may_move(Rival.COOPERATE, moves=True, look=look)
    assert within.read_text().strip() == "950"


def test_it_looks_as_it_does_where_debugfs_is_locked(
    root: Path,
    arbiter: Arbiter,
    looks: Callable[[], tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: Path) -> str | None:
        if "debug" in path.parts:
            raise PermissionError
        return path.read_text().strip() if path.exists() else None

    monkeypatch.setattr(text, "read", refuse)
    write(root, "0")
    assert arbiter.may_move(Rival.COOPERATE, moves=True)
    assert mode(root) == "2"
    assert looks() == BY_ITSELF


def test_it_demotes_throughout_where_the_limit_is_another(
    root: Path, arbiter: Arbiter, written: list[str]
) -> None:
    """Or what page cache was asked to make way meanwhile would be dropped."""
    write(root, "0")
    for budget_mbps in (20, 50):
        arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=budget_mbps)
        assert tiering(root) == ("2", str(budget_mbps), "true")
    assert written.count(numa_balancing.DEMOTES) == 1


def test_it_promotes_only_within_the_limit_and_while_it_demotes(
    root: Path, arbiter: Arbiter, written: list[str]
) -> None:
    write(root, "0")
    arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=20)
    arbiter.may_move(Rival.COOPERATE, moves=True, rests=True)
    on = [numa_balancing.DEMOTES, numa_balancing.LIMIT, numa_balancing.PATH]
    assert written == [*on, *reversed(on)]


def test_it_is_turned_on_again_where_others_turn_it_off(
    root: Path, arbiter: Arbiter, journal: Journal
) -> None:
    write(root, "0")
    arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=20)
    write(root, "1")
    arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=20)
    assert tiering(root) == ("3", "20", "true")
    list(journal.undo())
    assert tiering(root) == ("1", "65536", "false")


def test_it_is_put_back_while_moves_rest(root: Path, arbiter: Arbiter, journal: Journal) -> None:
    write(root, "0")
    arbiter.may_move(Rival.COOPERATE, moves=True, budget_mbps=20)
    assert arbiter.may_move(Rival.COOPERATE, moves=True, rests=True)
    assert not arbiter.cooperates
    assert tiering(root) == ("0", "65536", "false")
    assert not journal.changes


@pytest.mark.parametrize(
    "lacks", [numa_balancing.PATH, numa_balancing.LIMIT, numa_balancing.DEMOTES]
)
def test_a_kernel_that_cannot_cooperate_is_refused(
    root: Path, arbiter: Arbiter, journal: Journal, lacks: str
) -> None:
    write(root, "0")
    (root / lacks).unlink()
    with pytest.raises(UnsupportedKernel, match="places no pages by itself") as caught:
        arbiter.may_move(Rival.COOPERATE, moves=True)
    assert "cooperate" in (caught.value.hint or "")
    assert not journal.changes
