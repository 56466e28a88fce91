# SPDX-License-Identifier: Apache-2.0
"""Schemes in kdamonds' slots, over an imagined DAMON."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.fake_damon import ADMIN, FakeDamon
from tests.unit.test_damon import MARK_US, SETUP, SLOT, TARGET
from tests.unit.test_session import Now
from tierd.kernel.damon import Admin, Setup, SlotIndex
from tierd.migrate.schemes import COUNT_S, KernelSchemes, make_none
from tierd.model import COUNT_ALL, Action, NodeId, NodeShare, Quota, QuotaGoal, Scheme

SCHEMES = f"{ADMIN}/0/contexts/0/schemes"
WORKER = Now()


def quota(what: NodeShare, targets: int) -> Quota:
    goal = QuotaGoal(what=what, node=NodeId(0), least_bp=300)
    return Quota(bytes=(1 << 20) // targets, interval_ms=1000, goal=goal)


def make(setup: Setup, targets: int) -> tuple[Scheme, ...]:
    return (
        Scheme(
            action=Action.PROMOTE,
            least_accesses=setup.aggregation_us // setup.sample_us // 4,
            destination=NodeId(0),
            quota=quota(NodeShare.USED, targets),
        ),
        Scheme(
            action=Action.DEMOTE,
            most_accesses=0,
            least_age=25,
            destination=NodeId(2),
            quota=quota(NodeShare.FREE, targets),
        ),
    )


@pytest.fixture
def fake(tmp_path: Path) -> FakeDamon:
    return FakeDamon(tmp_path, kdamonds=2, processes=[TARGET])


@pytest.fixture
def admin(fake: FakeDamon) -> Admin:
    return Admin(fake.root, fake)


@pytest.fixture
def kernel(admin: Admin) -> KernelSchemes:
    kernel = KernelSchemes(admin)
    kernel.hand(make)
    begin(admin, kernel)
    return kernel


def begin(
    admin: Admin, kernel: KernelSchemes, slot: SlotIndex = SLOT, kept: tuple[Scheme, ...] = ()
) -> None:
    """Starts a target's kdamond as a session does."""
    admin.claim(slot, MARK_US)
    admin.set_up(slot, SETUP)
    admin.set_target(slot, TARGET)
    kernel.set_up(slot, SETUP, kept=kept, targets=1, now_s=0.0)
    assert admin.turn_on(slot) is not None


def commands(fake: FakeDamon) -> list[str]:
    """What kdamonds were told since they began, in order."""
    told = [value for name, value in fake.writes if name.endswith("/state")]
    return [command for command in told if command != "on"]


def done(pages: int) -> dict[str, int]:
    size = pages << 12
    return {"nr_tried": 9, "sz_tried": 2 * size, "nr_applied": 3, "sz_applied": size}


def pages(kernel: KernelSchemes) -> tuple[int, int]:
    applied = kernel.applied
    return applied[Action.PROMOTE].bytes >> 12, applied[Action.DEMOTE].bytes >> 12


def test_a_kdamond_begins_with_the_schemes(fake: FakeDamon, kernel: KernelSchemes) -> None:
    assert fake.values[f"{SCHEMES}/nr_schemes"] == "2"
    assert [fake.values[f"{SCHEMES}/{n}/action"] for n in (0, 1)] == ["migrate_hot", "migrate_cold"]
    assert fake.values[f"{SCHEMES}/0/access_pattern/nr_accesses/min"] == "5"

    kernel.follow({SLOT: SETUP}, WORKER, 1.0)

    assert commands(fake) == []


def test_others_schemes_stay_before(fake: FakeDamon, admin: Admin, kernel: KernelSchemes) -> None:
    kernel.leave(SLOT)
    admin.release(SLOT)
    begin(admin, kernel, kept=(COUNT_ALL,))
    fake.done = {(0, 0): done(1), (0, 1): done(100), (0, 2): done(7)}

    kernel.follow({SLOT: SETUP}, WORKER, COUNT_S)
    kernel.follow({SLOT: SETUP}, WORKER, COUNT_S)

    assert [fake.values[f"{SCHEMES}/{n}/action"] for n in (0, 1)] == ["stat", "migrate_hot"]
    assert pages(kernel) == (100, 7)


def test_another_sampling_means_other_schemes(fake: FakeDamon, kernel: KernelSchemes) -> None:
    finer = replace(SETUP, aggregation_us=800_000)

    kernel.follow({SLOT: finer}, WORKER, 1.0)
    kernel.follow({SLOT: finer}, WORKER, 1.0)

    assert fake.values[f"{SCHEMES}/0/access_pattern/nr_accesses/min"] == "10"
    # Without reading back what the kernel has tuned, the commit would put the intervals back.
    assert commands(fake) == ["update_schemes_stats", "update_tuned_intervals", "commit"]


def test_the_budget_is_divided_anew(fake: FakeDamon, admin: Admin, kernel: KernelSchemes) -> None:
    other = SlotIndex(1)
    begin(admin, kernel, other)

    kernel.follow({SLOT: SETUP, other: SETUP}, WORKER, 1.0)

    both = [fake.values[f"{ADMIN}/{n}/contexts/0/schemes/0/quotas/bytes"] for n in (0, 1)]
    assert both == [str(1 << 19)] * 2


def test_what_was_moved_is_counted_now_and_then(fake: FakeDamon, kernel: KernelSchemes) -> None:
    fake.done = {(0, 0): done(100), (0, 1): done(40)}

    for now_s in (0.5 * COUNT_S, COUNT_S, 1.5 * COUNT_S):
        kernel.follow({SLOT: SETUP}, WORKER, now_s)
    assert pages(kernel) == (100, 40)
    assert commands(fake) == ["update_schemes_stats"]

    fake.done[0, 0] = done(150)
    for now_s in (2 * COUNT_S, 3 * COUNT_S):
        kernel.follow({SLOT: SETUP}, WORKER, now_s)
    assert pages(kernel) == (150, 40)


def test_at_rest_there_are_no_schemes_and_counts_stay(
    fake: FakeDamon, kernel: KernelSchemes
) -> None:
    fake.done = {(0, 0): done(100), (0, 1): done(40)}
    kernel.hand(make_none)
    for now_s in (1.0, 1.1):
        kernel.follow({SLOT: SETUP}, WORKER, now_s)
    assert fake.values[f"{SCHEMES}/nr_schemes"] == "0"
    assert commands(fake)[-1] == "commit"
    assert pages(kernel) == (100, 40)

    fake.done = {(0, 0): done(5), (0, 1): done(0)}  # a scheme that is new counts from nothing
    kernel.hand(make)
    for now_s in (2.0, 2.1, 2.1 + COUNT_S, 2.2 + COUNT_S):
        kernel.follow({SLOT: SETUP}, WORKER, now_s)
    assert fake.values[f"{SCHEMES}/nr_schemes"] == "2"
    assert pages(kernel) == (105, 40)


def test_a_slot_of_another_target_counts_from_nothing(
    fake: FakeDamon, admin: Admin, kernel: KernelSchemes
) -> None:
    fake.done = {(0, 0): done(100), (0, 1): done(40)}
    kernel.follow({SLOT: SETUP}, WORKER, COUNT_S)
    kernel.leave(SLOT)
    admin.release(SLOT)
    assert pages(kernel) == (100, 40)

    fake.done = {(0, 0): done(10), (0, 1): done(1)}
    begin(admin, kernel)
    kernel.follow({SLOT: SETUP}, WORKER, COUNT_S)
    kernel.leave(SLOT)

    assert pages(kernel) == (110, 41)


def test_what_fails_is_tried_again(
    fake: FakeDamon, kernel: KernelSchemes, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Admin.command

    def refuse(admin: Admin, index: SlotIndex, name: str) -> bool:
        if name == "commit":
            raise OSError(12, "no memory")
        return command(admin, index, name)

    kernel.hand(make_none)
    with monkeypatch.context() as patch:
        patch.setattr(Admin, "command", refuse)
        kernel.follow({SLOT: SETUP}, WORKER, 1.0)
    assert "commit" not in commands(fake)

    kernel.follow({SLOT: SETUP}, WORKER, 2.0)

    assert commands(fake)[-1] == "commit"


def test_a_kdamond_that_has_stopped_is_let_be(fake: FakeDamon, kernel: KernelSchemes) -> None:
    fake.exit(TARGET)
    fake.done = {(0, 0): done(100)}

    for now_s in (COUNT_S, 2 * COUNT_S):
        kernel.follow({SLOT: SETUP}, WORKER, now_s)

    assert pages(kernel) == (0, 0)
