# SPDX-License-Identifier: Apache-2.0
"""Settings that two hold at once."""

import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.errors import TierdError
from tierd.held import Held
from tierd.journal import Journal
from tierd.kernel.tunable import KernelFiles

ALL = {"a": "1", "b": "1", "c": "1"}
BEFORE = {"a": "0", "b": "0", "c": "0"}


class Files(KernelFiles):
    """Keeps what is written, once the journal has it, and refuses what is to be `refused`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writes = list[tuple[str, str]]()
        self.refused = set[tuple[str, str]]()

    def write(self, path: Path, value: str) -> None:
        if (path.name, value) in self.refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        lines = (self.root / "state/journal.jsonl").read_text().splitlines()
        recorded = [json.loads(line) for line in lines]
        assert any(line.get("path") == str(path) for line in recorded)
        self.writes.append((path.name, value))
        super().write(path, value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
    for name, value in BEFORE.items():
        (tmp_path / name).write_text(f"{value}\n")
    return tmp_path


@pytest.fixture
def files(root: Path) -> Files:
    return Files(root)


@pytest.fixture
def journal(root: Path, files: Files) -> Iterator[Journal]:
    with Journal(root / "state", root=root, files=files) as journal:
        yield journal


@pytest.fixture
def held(root: Path, journal: Journal) -> Held:
    return Held(journal, root)


def now(root: Path) -> dict[str, str]:
    return {name: (root / name).read_text().strip() for name in BEFORE}


def test_all_is_set_in_order_and_put_back_in_reverse(
    root: Path, held: Held, journal: Journal, files: Files
) -> None:
    assert held.hold("one", ALL)
    assert not held.hold("one", ALL)
    assert now(root) == ALL
    held.let_go("one")
    held.let_go("one")
    assert files.writes == [
        *[(name, "1") for name in "abc"],
        *[(name, "0") for name in "cba"],
    ]
    assert not journal.changes


@pytest.mark.parametrize(("first", "last"), [("one", "other"), ("other", "one")])
def test_what_two_hold_stays_until_the_last_lets_go(
    root: Path, held: Held, journal: Journal, files: Files, first: str, last: str
) -> None:
    held.hold("one", ALL)
    assert not held.hold("other", {"b": "1"})
    assert files.writes == [(name, "1") for name in "abc"], "each once"
    held.let_go(first)
    assert now(root) == ({**BEFORE, "b": "1"} if first == "one" else ALL)
    held.let_go(last)
    assert now(root) == BEFORE
    assert not journal.changes


def test_what_one_wants_no_more_is_put_back(root: Path, held: Held, files: Files) -> None:
    held.hold("one", ALL)
    held.hold("other", {"b": "1"})
    files.writes.clear()
    assert not held.hold("one", {"a": "1"})
    assert files.writes == [("c", "0")]
    held.let_go("other")
    assert now(root) == {**BEFORE, "a": "1"}


def test_what_was_so_by_itself_is_left_so(root: Path, held: Held, journal: Journal) -> None:
    (root / "b").write_text("1\n")
    held.hold("one", ALL)
    held.hold("other", {"b": "1"})
    assert len(journal.changes) == 2
    held.let_go("one")
    held.let_go("other")
    assert now(root) == {**BEFORE, "b": "1"}


@pytest.mark.parametrize("owners", [("one",), ("one", "other")])
def test_what_others_write_meanwhile_stays(
    root: Path,
    held: Held,
    journal: Journal,
    owners: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for owner in owners:
        held.hold(owner, {"a": "1"})
    (root / "a").write_text("7\n")
    with caplog.at_level(logging.INFO, "tierd"):
        for owner in owners:
            held.let_go(owner)
    assert now(root)["a"] == "7"
    (line,) = caplog.messages
    assert "holds '7', not our '1': left as it is" in line
    assert not journal.changes


@pytest.mark.parametrize("value", ["0", "7"])
def test_what_others_write_is_set_again_and_put_back_last(
    root: Path, held: Held, journal: Journal, value: str
) -> None:
    held.hold("one", ALL)
    held.hold("other", {"a": "1"})
    (root / "a").write_text(f"{value}\n")
    assert held.change("a") is None
    assert held.hold("other", {"a": "1"})
    assert len(journal.changes) == 3
    held.let_go("other")
    assert now(root) == ALL
    held.let_go("one")
    assert now(root) == {**BEFORE, "a": value}


def test_another_value_is_for_the_time_before_the_first(
    root: Path, held: Held, files: Files
) -> None:
    for value in ("5", "6"):
        held.hold("one", {"a": value})
        change = held.change("a")
        assert change is not None
        assert (change.before, change.after) == ("0", value)
    held.let_go("one")
    assert now(root) == BEFORE
    assert files.writes == [("a", "5"), ("a", "6"), ("a", "0")]


def test_a_value_of_others_that_is_then_wanted_is_theirs(root: Path, held: Held) -> None:
    held.hold("one", {"a": "5"})
    (root / "a").write_text("6\n")
    assert not held.hold("one", {"a": "6"})
    (root / "a").write_text("5\n")
    assert held.change("a") is None
    held.let_go("one")
    assert now(root)["a"] == "5"


@pytest.mark.parametrize(
    ("other", "fails"),
    [({}, "a"), ({}, "b"), ({}, "c"), ({"a": "1"}, "c"), ({"b": "1", "c": "1"}, "a")],
)
def test_where_one_cannot_be_set_none_is(
    root: Path, held: Held, journal: Journal, files: Files, other: dict[str, str], fails: str
) -> None:
    held.hold("other", other)
    files.refused = {(fails, "1")}
    with pytest.raises(OSError, match=f"/{fails}"):
        held.hold("one", ALL)
    assert now(root) == {**BEFORE, **other}
    assert len(journal.changes) == len(other)
    files.refused.clear()
    held.hold("one", ALL)
    assert now(root) == ALL
    held.let_go("other")
    held.let_go("one")
    assert now(root) == BEFORE


def test_where_another_value_cannot_be_set_nothing_is_held(
    root: Path, held: Held, journal: Journal, files: Files
) -> None:
    held.hold("one", ALL)
    held.hold("other", {"a": "1"})
    files.refused = {("b", "2")}
    with pytest.raises(OSError, match="/b"):
        held.hold("one", {**ALL, "b": "2"})
    assert now(root) == {**BEFORE, "a": "1"}
    assert len(journal.changes) == 1


def test_what_cannot_be_recorded_is_not_set(
    root: Path, held: Held, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    held.hold("one", {"a": "1"})
    monkeypatch.setattr("tierd.journal._write_synced", full)
    with pytest.raises(TierdError, match="changes nothing that it cannot record"):
        held.hold("one", ALL)
    assert now(root) == BEFORE
    assert files.writes == [("a", "1"), ("a", "0")]


def test_what_cannot_be_put_back_is_tried_again_by_anybody(
    root: Path, held: Held, journal: Journal, files: Files
) -> None:
    held.hold("one", ALL)
    files.refused = {("b", "0")}
    with pytest.raises(OSError, match="/b"):
        held.let_go("one")
    assert now(root) == {**ALL, "c": "0"}
    files.refused.clear()
    held.let_go("other")
    assert now(root) == BEFORE
    assert not journal.changes


def test_what_a_killed_one_held_is_put_back_by_the_next(root: Path, files: Files) -> None:
    with Journal(root / "state", root=root, files=files) as journal:
        held = Held(journal, root)
        held.hold("one", ALL)
        held.hold("other", {"b": "1"})
        held.let_go("one")
    with Journal(root / "state", root=root, files=files) as journal:
        assert len(journal.undo()) == 1
    assert now(root) == BEFORE
