# SPDX-License-Identifier: Apache-2.0
import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fake_damon import ADMIN, FakeDamon
from tierd import journal as journal_module
from tierd.errors import Conflict, TierdError
from tierd.journal import Journal, Kdamond, Slots, Tunable
from tierd.kernel.damon import Admin, SlotIndex
from tierd.model import Pid

TARGET = Pid(77)
MARK_US = 1_012_345


class Killed(BaseException):
    """Stands for SIGKILL: no `except Exception` and no clean-up of ours sees it."""


@pytest.fixture
def fake(tmp_path: Path) -> FakeDamon:
    return made(tmp_path)


def made(folder: Path) -> FakeDamon:
    fake = FakeDamon(folder / "root", processes=[TARGET, 88])
    fake.exclusive["damon_stat"] = True
    fake.values["knob"] = "0"
    return fake


@pytest.fixture
def journal(fake: FakeDamon, tmp_path: Path) -> Iterator[Journal]:
    with opened(fake, tmp_path / "state") as journal:
        yield journal


def opened(fake: FakeDamon, state: Path) -> Journal:
    return Journal(state, root=fake.root, files=fake)


def switch(fake: FakeDamon) -> Path:
    return Admin(fake.root, fake).exclusive_switch("damon_stat")


def start_all(fake: FakeDamon, journal: Journal) -> None:
    """Changes everything that a session changes, in its order."""
    admin = Admin(fake.root, fake)
    journal.write(switch(fake), "N")
    knob = journal.write(fake.root / "knob", "1")
    assert knob is not None
    journal.write_over(knob, "2")
    journal.record(Slots(before=0, after=4))
    admin.resize(4)
    change = Kdamond(slot=1, mark_us=MARK_US, target=TARGET)
    entry = journal.record(change)
    admin.claim(SlotIndex(1), MARK_US)
    admin.set_target(SlotIndex(1), TARGET)
    pid = admin.turn_on(SlotIndex(1))
    journal.amend(entry, Kdamond(slot=1, mark_us=MARK_US, target=TARGET, pid=pid))


def is_as_it_was(fake: FakeDamon) -> bool:
    return (
        not fake.running and fake.values == {f"{ADMIN}/nr_kdamonds": "0", "knob": "0"}
    ) and fake.exclusive == {"damon_stat": True}


def test_everything_is_taken_back_once(fake: FakeDamon, journal: Journal) -> None:
    start_all(fake, journal)

    told = journal.undo()

    assert is_as_it_was(fake)
    assert [line.split()[0] for line in told] == [
        "kdamond",
        "nr_kdamonds:",
        f"{fake.root}/knob:",
        f"{switch(fake)}:",
    ]
    writes = list(fake.writes)
    assert journal.undo() == []
    assert fake.writes == writes


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 40), torn=st.integers(0, 200))
def test_a_kill_at_any_step_is_undone(at: int, torn: int) -> None:
    """Dies before the n-th write to the machine or the journal, which may leave half a line."""
    with tempfile.TemporaryDirectory() as folder:
        fake = made(Path(folder))
        state = Path(folder) / "state"
        die_in(fake, state, at, torn)

        with opened(fake, state) as journal:
            journal.undo()

            assert is_as_it_was(fake)
            assert journal.undo() == []


def die_in(fake: FakeDamon, state: Path, at: int, torn: int) -> None:
    steps = iter(range(at))
    write, append = FakeDamon.write, journal_module._write_synced

    def write_or_die(self: FakeDamon, path: Path, value: str) -> None:
        if next(steps, None) is None:
            raise Killed
        write(self, path, value)

    def append_or_die(fd: int, data: bytes) -> None:
        if next(steps, None) is None:
            os.write(fd, data[:torn] if torn < len(data) else data)
            raise Killed
        append(fd, data)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(FakeDamon, "write", write_or_die)
        patch.setattr(journal_module, "_write_synced", append_or_die)
        with opened(fake, state) as journal:
            start_all(fake, journal)


def test_the_steps_of_the_property_above_reach_the_end(fake: FakeDamon, tmp_path: Path) -> None:
    die_in(fake, tmp_path / "state", 40, 0)

    assert fake.running


def test_an_undo_cut_short_is_finished_by_the_next(fake: FakeDamon, tmp_path: Path) -> None:
    write = FakeDamon.write
    for steps in range(1, 5):
        with opened(fake, tmp_path / "state") as journal:
            if not journal.changes:
                start_all(fake, journal)
            left = iter(range(steps))

            def limited(
                self: FakeDamon, path: Path, value: str, left: Iterator[int] = left
            ) -> None:
                if next(left, None) is None:
                    raise Killed
                write(self, path, value)

            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
                patch.setattr(FakeDamon, "write", limited)
                journal.undo()
    with opened(fake, tmp_path / "state") as journal:
        journal.undo()
    assert is_as_it_was(fake)


def test_a_value_changed_since_is_left(fake: FakeDamon, journal: Journal) -> None:
    knob = fake.root / "knob"
    fake.values["knob"] = "1"
    journal.write(knob, "0")
    fake.write(knob, "2")

    assert journal.undo() == [f"{knob} holds '2', not our '0': left as it is"]
    assert fake.values["knob"] == "2"


def test_a_value_that_holds_already_is_no_change(fake: FakeDamon, journal: Journal) -> None:
    fake.values["knob"] = "1"

    assert journal.write(fake.root / "knob", "1") is None
    assert journal.changes == {}


def test_a_refused_write_leaves_no_entry(fake: FakeDamon, journal: Journal) -> None:
    fake.exclusive["damon_stat"] = False
    Admin(fake.root, fake).resize(1)
    fake.start_foreign(0, 88)

    with pytest.raises(OSError, match="busy"):
        journal.write(switch(fake), "Y")

    assert journal.changes == {}


def test_a_kdamond_of_another_pid_in_our_slot_is_left(fake: FakeDamon, journal: Journal) -> None:
    start_all(fake, journal)
    fake.running[1] = 999

    told = journal.undo()

    assert fake.running == {1: 999}
    assert "left as it is" in told[0]
    assert "process 77" in told[1]
    assert fake.values[f"{ADMIN}/nr_kdamonds"] == "4"


def test_a_slot_set_up_by_somebody_else_is_left(fake: FakeDamon, journal: Journal) -> None:
    start_all(fake, journal)
    fake.exit(TARGET)
    fake.start_foreign(1, 88)
    fake.write(fake.root / ADMIN / "1/state", "off")

    journal.undo()

    slot = Admin(fake.root, fake).slot(SlotIndex(1))
    assert slot is not None
    assert slot.targets == (88,)


def test_a_foreign_kdamond_beside_ours_goes_on(fake: FakeDamon, journal: Journal) -> None:
    start_all(fake, journal)
    fake.start_foreign(3, 88)

    told = journal.undo()

    assert list(fake.running) == [3]
    assert "would wipe kdamond 3 (on, pid 401; vaddr of process 88)" in told[1]


def test_what_cannot_be_undone_now_is_kept(fake: FakeDamon, journal: Journal) -> None:
    start_all(fake, journal)
    fake.start_foreign(3, 88)

    assert "recorded for the next start" in journal.undo()[-1]
    fake.exit(88)
    fake.write(fake.root / ADMIN / "3/contexts/nr_contexts", "0")

    journal.undo()
    assert fake.exclusive == {"damon_stat": True}


def test_an_earlier_boot_means_nothing(fake: FakeDamon, tmp_path: Path) -> None:
    with opened(fake, tmp_path / "state") as journal:
        start_all(fake, journal)
    fake.reboot("boot-2")
    writes = list(fake.writes)

    with opened(fake, tmp_path / "state") as journal:
        assert journal.undo() == []
    assert fake.writes == writes


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[]",
        b'{"boot": "boot-1"}',
        b'{"boot": "boot-1", "id": 9, "kind": "unheard-of"}',
        b'{"boot": "boot-1", "id": 9, "kind": "slots", "before": "0", "after": 4}',
        b'{"boot": "boot-1", "id": 9, "kind": "slots", "before": 0}',
        b'{"boot": "boot-1", "id": 9, "kind": "region", "decoders": [1]}',
        b'{"boot": "boot-1", "id": 9, "kind": "region", "decoders": "decoder2.0"}',
        b"\xff\xfe",
        b'{"boot": "boot-1", "id": 1e999, "kind": "undone"}',
        b"[" * 100_000,
    ],
)
def test_a_spoilt_line_is_told_and_passed_over(
    fake: FakeDamon, tmp_path: Path, line: bytes
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    fake.values["knob"] = "0"
    good = {"boot": "boot-1", "id": 1, "kind": "tunable", "before": "1", "after": "0"}
    good["path"] = str(fake.root / "knob")
    (state / "journal.jsonl").write_bytes(line + b"\n" + json.dumps(good).encode() + b"\n")

    with opened(fake, state) as journal:
        told = journal.undo()

    assert "journal.jsonl:1 cannot be read" in told[0]
    assert fake.values["knob"] == "1"


def test_the_file_is_for_root_alone(journal: Journal, tmp_path: Path) -> None:
    assert (tmp_path / "state/journal.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_second_tierd_is_kept_out(fake: FakeDamon, journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="another tierd"):
        opened(fake, tmp_path / "state")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_what_cannot_be_recorded_is_not_done(fake: FakeDamon, tmp_path: Path, number: int) -> None:
    journal = opened(fake, tmp_path / "state")

    def refuse(fd: int, data: bytes) -> None:
        os.write(fd, data[:5])
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "_write_synced", refuse)
        with pytest.raises(TierdError, match=os.strerror(number)):
            journal.write(switch(fake), "N")
    assert fake.writes == []

    start_all(fake, journal)
    journal.close()
    with opened(fake, tmp_path / "state") as again:
        again.undo()
    assert is_as_it_was(fake)


def test_a_torn_line_spoils_none_behind_it(fake: FakeDamon, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/journal.jsonl").write_bytes(b'{"boot": "boot-1", "id": 1, "ki')

    with opened(fake, tmp_path / "state") as journal:
        start_all(fake, journal)
    with opened(fake, tmp_path / "state") as journal:
        assert not [line for line in journal.undo() if "cannot be read" in line]
    assert is_as_it_was(fake)


def test_a_full_disk_is_no_room_for_a_line(
    fake: FakeDamon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full answers every write with ENOSPC, as the kernel does for a full disk."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "journal.jsonl").symlink_to("/dev/full")
    monkeypatch.setattr(journal_module, "_read", lambda _: b"")

    with opened(fake, state) as journal, pytest.raises(TierdError, match="No space left"):
        journal.write(switch(fake), "N")

    assert fake.writes == []


def test_a_state_directory_that_cannot_be_made_is_named(fake: FakeDamon, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(TierdError, match="file/state"):
        opened(fake, tmp_path / "file/state")


def test_the_file_stays_small_however_long_it_is_used(
    fake: FakeDamon, journal: Journal, tmp_path: Path
) -> None:
    fake.values |= {"knob": "0", "kept": "0"}
    journal.write(fake.root / "kept", "1")
    for _ in range(journal_module.COMPACT_LINES):
        entry = journal.write(fake.root / "knob", "1")
        assert entry is not None
        journal.revert(entry)

    lines = (tmp_path / "state/journal.jsonl").read_text().splitlines()
    assert len(lines) <= journal_module.COMPACT_LINES + 2
    assert list(journal.changes.values()) == [
        Tunable(path=str(fake.root / "kept"), before="0", after="1")
    ]


def test_many_spoilt_lines_are_told_in_a_few(fake: FakeDamon, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/journal.jsonl").write_bytes(b"\0\n" * 1000)

    with opened(fake, tmp_path / "state") as journal:
        told = journal.undo()

    assert len(told) == journal_module.TOLD_LINES + 1
    assert told[-1] == "and so are 992 other lines"


def test_a_file_too_large_for_a_journal_is_left_alone(fake: FakeDamon, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    huge = tmp_path / "state/journal.jsonl"
    huge.touch()
    os.truncate(huge, 1 << 40)

    with pytest.raises(TierdError, match="it has more than 16 MiB") as caught:
        opened(fake, tmp_path / "state")

    assert "moved aside" in (caught.value.hint or "")
    assert huge.stat().st_size == 1 << 40


def test_a_file_that_cannot_be_read_is_named(
    fake: FakeDamon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "journal.jsonl":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)

    with pytest.raises(TierdError, match=r"journal.jsonl: Input/output error: what an earlier"):
        opened(fake, tmp_path / "state")


WORDS = st.one_of(
    st.none(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)
LINES = st.fixed_dictionaries(
    {
        "boot": st.just("boot-1"),
        "id": st.one_of(st.integers(0, 3), WORDS),
        "kind": st.sampled_from(["tunable", "slots", "kdamond", "region", "undone"]),
    },
    optional={
        name: st.one_of(st.integers(0, 4), WORDS)
        for name in ("path", "before", "after", "slot", "mark_us", "target", "pid")
    },
)


@given(st.lists(st.one_of(LINES.map(json.dumps).map(str.encode), st.binary()), max_size=6))
def test_whatever_is_in_the_file_a_start_gets_through(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fake = FakeDamon(Path(folder) / "root", kdamonds=4, processes=[88])
        fake.start_foreign(0, 88)
        state = Path(folder) / "state"
        state.mkdir()
        (state / "journal.jsonl").write_bytes(b"\n".join(lines))

        with opened(fake, state) as journal:
            journal.undo()

        assert fake.running == {0: 400}


def test_the_journal_goes_on_where_its_folder_cannot_be_synced(
    fake: FakeDamon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is in place by then, and lines that went to the old one would be lost."""
    sync = os.fsync

    def refuse_folders(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink() == tmp_path / "state":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    fake.values["knob"] = "0"
    with opened(fake, tmp_path / "state") as journal:
        journal.write(fake.root / "knob", "1")
        journal.undo()
    monkeypatch.setattr(os, "fsync", refuse_folders)
    with opened(fake, tmp_path / "state") as journal:
        start_all(fake, journal)
    with opened(fake, tmp_path / "state") as journal:
        journal.undo()

    assert not fake.running


def test_what_was_undone_on_a_full_disk_is_not_undone_again(
    fake: FakeDamon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who sets a value to what tierd had given it is left alone."""
    knob = fake.root / "knob"
    fake.values["knob"] = "1"
    with opened(fake, tmp_path / "state") as journal, monkeypatch.context() as patch:
        journal.write(knob, "0")

        def refuse(fd: int, data: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(journal_module, "_write_synced", refuse)
        journal.undo()
    assert fake.values["knob"] == "1"
    fake.write(knob, "0")

    with opened(fake, tmp_path / "state") as journal:
        assert journal.undo() == []
    assert fake.values["knob"] == "0"
