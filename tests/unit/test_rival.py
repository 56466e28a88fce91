# SPDX-License-Identifier: Apache-2.0
"""What the daemon does where the kernel places pages itself."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.cli.daemon import must_only_observe
from tierd.config import Rival
from tierd.errors import Conflict
from tierd.journal import Journal
from tierd.kernel import numa_balancing


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / numa_balancing.PATH).parent.mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random").mkdir()
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
    return tmp_path


@pytest.fixture
def journal(root: Path) -> Iterator[Journal]:
    with Journal(root / "state", root=root) as journal:
        yield journal


def mode(root: Path) -> str:
    return (root / numa_balancing.PATH).read_text().strip()


@pytest.mark.parametrize("wanted", Rival)
@pytest.mark.parametrize("value", ["0", None])
def test_nothing_is_done_where_it_is_off_or_absent(
    root: Path, journal: Journal, wanted: Rival, value: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if value is not None:
        (root / numa_balancing.PATH).write_text(value)
    assert not must_only_observe(wanted, journal, root)
    assert not journal.changes
    assert not caplog.records


def test_it_is_turned_off_and_put_back(root: Path, journal: Journal) -> None:
    (root / numa_balancing.PATH).write_text("3")
    assert not must_only_observe(Rival.TAKE_OVER, journal, root)
    assert mode(root) == "0"
    list(journal.undo())
    assert mode(root) == "3"


def test_what_others_write_meanwhile_stays(root: Path, journal: Journal) -> None:
    (root / numa_balancing.PATH).write_text("1")
    must_only_observe(Rival.TAKE_OVER, journal, root)
    (root / numa_balancing.PATH).write_text("2")
    list(journal.undo())
    assert mode(root) == "2"


def test_it_is_refused_with_the_next_step(root: Path, journal: Journal) -> None:
    (root / numa_balancing.PATH).write_text("2")
    with pytest.raises(Conflict, match="is 2: the kernel promotes pages itself") as caught:
        must_only_observe(Rival.REFUSE, journal, root)
    assert "take_over" in (caught.value.hint or "")


@pytest.mark.parametrize(("wanted", "observes"), [(Rival.OBSERVE, True), (Rival.IGNORE, False)])
def test_it_is_left_on_and_told(
    root: Path,
    journal: Journal,
    wanted: Rival,
    observes: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (root / numa_balancing.PATH).write_text("1")
    with caplog.at_level(logging.WARNING, "tierd"):
        assert must_only_observe(wanted, journal, root) == observes
    assert "the kernel moves pages to the CPUs that use them" in caplog.text
    assert mode(root) == "1"
