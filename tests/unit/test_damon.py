# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.unit import fake_damon
from tests.unit.fake_damon import ADMIN, FakeDamon
from tierd.errors import Conflict, TierdError, UnsupportedKernel
from tierd.kernel import damon
from tierd.kernel.damon import Admin, Applied, ExclusiveUse, Goal, Setup, SlotIndex
from tierd.model import COUNT_ALL, Action, NodeId, NodeShare, Pid, Quota, QuotaGoal, Scheme

SLOT = SlotIndex(0)
TARGET = Pid(77)
MARK_US = 1_012_345
SETUP = Setup(
    sample_us=20_000,
    aggregation_us=400_000,
    update_us=MARK_US,
    min_regions=10,
    max_regions=500,
    goal=Goal(access_bp=400, aggregations=3, min_sample_us=20_000, max_sample_us=200_000),
)


@pytest.fixture
def fake(tmp_path: Path) -> FakeDamon:
    return FakeDamon(tmp_path, kdamonds=2, processes=[TARGET, 88])


@pytest.fixture
def admin(fake: FakeDamon) -> Admin:
    return Admin(fake.root, fake)


def start(admin: Admin) -> Pid | None:
    admin.claim(SLOT, MARK_US)
    admin.set_up(SLOT, SETUP)
    admin.set_target(SLOT, TARGET)
    return admin.turn_on(SLOT)


def test_a_started_slot_shows_what_was_set_up(fake: FakeDamon, admin: Admin) -> None:
    kdamond = start(admin)

    slot = admin.slot(SLOT)
    assert slot is not None
    assert kdamond is not None
    assert (slot.is_on, slot.kdamond, slot.targets) == (True, kdamond, (TARGET,))
    assert slot.update_us == MARK_US
    context = f"{ADMIN}/0/contexts/0/monitoring_attrs"
    assert fake.values[f"{context}/intervals/sample_us"] == "20000"
    assert fake.values[f"{context}/intervals/intervals_goal/access_bp"] == "400"
    assert fake.values[f"{context}/nr_regions/max"] == "500"
    assert str(slot) == f"kdamond 0 (on, pid {kdamond}; vaddr of process 77)"


def test_released_slots_are_empty_and_off_before_their_context_goes(
    fake: FakeDamon, admin: Admin
) -> None:
    start(admin)

    admin.release(SLOT)

    slot = admin.slot(SLOT)
    assert slot is not None
    assert slot.is_free
    assert fake.running == {}


def test_a_slot_whose_process_has_exited_can_be_released(fake: FakeDamon, admin: Admin) -> None:
    start(admin)
    fake.exit(TARGET)

    assert not admin.command(SLOT, "commit")
    admin.release(SLOT)

    assert all(slot.is_free for slot in admin.slots())


def test_a_lock_held_for_a_moment_is_waited_for(fake: FakeDamon, admin: Admin) -> None:
    fake.busy = 3

    assert start(admin) is not None


def test_a_lock_held_for_long_is_named(
    fake: FakeDamon, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damon, "LOCK_WAIT_S", 0.05)
    fake.busy = 1_000_000

    with pytest.raises(Conflict, match=r"nr_contexts.*busy for 0.05 s"):
        admin.claim(SLOT, MARK_US)


@pytest.mark.parametrize("module", ["damon_stat", "damon_reclaim", "damon_lru_sort"])
def test_who_keeps_damon_for_itself_is_named_at_once(
    fake: FakeDamon, admin: Admin, module: str
) -> None:
    fake.exclusive = {"damon_stat": False, "damon_reclaim": False, "damon_lru_sort": False}
    fake.exclusive[module] = True

    with pytest.raises(ExclusiveUse, match=module) as caught:
        start(admin)

    assert f"{module}/parameters/enabled" in str(caught.value.hint)
    assert ("take_over" in str(caught.value.hint)) == (module == "damon_stat")


def test_a_pid_that_nobody_has_is_refused_as_the_kernel_does(admin: Admin) -> None:
    admin.claim(SLOT, MARK_US)
    admin.set_up(SLOT, SETUP)
    admin.set_target(SLOT, Pid(999))

    with pytest.raises(OSError, match="Invalid argument"):
        admin.turn_on(SLOT)


def test_a_kernel_without_vaddr_leaves_the_slot_empty(
    fake: FakeDamon, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FakeDamon.read
    monkeypatch.setattr(
        FakeDamon,
        "read",
        lambda fake, path: "paddr" if path.name == "avail_operations" else read(fake, path),
    )

    with pytest.raises(UnsupportedKernel, match="vaddr") as caught:
        admin.claim(SLOT, MARK_US)

    assert "CONFIG_DAMON_VADDR" in str(caught.value.hint)
    assert all(slot.is_free for slot in admin.slots())


def test_a_kernel_without_the_interface_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedKernel) as caught:
        Admin(tmp_path).check()

    assert "CONFIG_DAMON_SYSFS" in str(caught.value.hint)


def test_a_kernel_without_a_goal_is_told_by_its_files(tmp_path: Path) -> None:
    old = FakeDamon(tmp_path, kdamonds=1, goal=False, processes=[TARGET])
    admin = Admin(tmp_path, old)
    admin.claim(SLOT, MARK_US)

    assert not admin.has_goal(SLOT)


@pytest.mark.parametrize(
    ("number", "hint"), [(13, "root"), (30, "container")], ids=["EACCES", "EROFS"]
)
def test_what_the_operator_can_mend_is_said(
    fake: FakeDamon, admin: Admin, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(_: FakeDamon, path: Path, __: str) -> None:
        raise OSError(number, "refused", str(path))

    monkeypatch.setattr(FakeDamon, "write", refuse)

    with pytest.raises(TierdError, match="nr_contexts") as caught:
        admin.claim(SLOT, MARK_US)

    assert hint in str(caught.value.hint)


def test_a_slot_that_is_gone_is_none(admin: Admin) -> None:
    assert admin.slot(SlotIndex(2)) is None


PROMOTE = Scheme(
    action=Action.PROMOTE,
    least_accesses=6,
    destination=NodeId(1),
    quota=Quota(
        bytes=1 << 20,
        interval_ms=1000,
        goal=QuotaGoal(what=NodeShare.USED, node=NodeId(1), least_bp=9800),
        by_accesses=True,
    ),
)


def of_a_scheme(fake: FakeDamon, number: int) -> dict[str, str]:
    folder = f"{ADMIN}/0/contexts/0/schemes/{number}/"
    found = {k.removeprefix(folder): v for k, v in fake.values.items() if k.startswith(folder)}
    return {name: value for name, value in found.items() if value != "0"}


def test_a_scheme_shows_what_was_set(fake: FakeDamon, admin: Admin) -> None:
    admin.claim(SLOT, MARK_US)
    admin.set_schemes(SLOT, [COUNT_ALL, PROMOTE])

    no_end = {
        "access_pattern/sz/max": "18446744073709551615",
        "access_pattern/nr_accesses/max": "4294967295",
        "access_pattern/age/max": "4294967295",
    }
    assert of_a_scheme(fake, 0) == {"action": "stat", **no_end}
    assert of_a_scheme(fake, 1) == {
        "action": "migrate_hot",
        **no_end,
        "access_pattern/nr_accesses/min": "6",
        "target_nid": "1",
        "dests/nr_dests": "1",
        "dests/0/id": "1",
        "dests/0/weight": "1",
        "quotas/bytes": "1048576",
        "quotas/reset_interval_ms": "1000",
        "quotas/weights/nr_accesses_permil": "1000",
        "quotas/goals/nr_goals": "1",
        "quotas/goals/0/target_metric": "node_mem_used_bp",
        "quotas/goals/0/nid": "1",
        "quotas/goals/0/target_value": "9800",
        "quotas/goal_tuner": "temporal",
        "quotas/fail_charge_num": "1",
        "quotas/fail_charge_denom": "32",
    }

    admin.set_schemes(SLOT, [])

    assert of_a_scheme(fake, 1) == {}


def test_what_only_some_kernels_tell_of_quotas_is_left_out_elsewhere(
    fake: FakeDamon, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = ("quotas/goal_tuner", "quotas/fail_charge_num", "quotas/fail_charge_denom")
    monkeypatch.setattr(fake_damon, "_SCHEME_OF_LATER_KERNELS", ("dests/nr_dests",))
    admin.claim(SLOT, MARK_US)

    admin.require_migration(SLOT)
    admin.set_schemes(SLOT, [PROMOTE])

    assert not of_a_scheme(fake, 0).keys() & set(later)


def test_a_kernel_that_cannot_place_by_itself_is_told_by_what_it_lacks(tmp_path: Path) -> None:
    old = FakeDamon(tmp_path, kdamonds=1, migration=False)
    admin = Admin(tmp_path, old)
    admin.claim(SLOT, MARK_US)

    with pytest.raises(UnsupportedKernel) as caught:
        admin.require_migration(SLOT)

    assert str(caught.value) == (
        "DAMON of this kernel cannot place memory by itself: it has no migration of virtual "
        "addresses (dests), no goal node_mem_used_bp, no goal node_mem_free_bp"
    )
    assert 'engine = "move_pages"' in str(caught.value.hint)


def test_what_schemes_have_done_is_read(fake: FakeDamon, admin: Admin) -> None:
    start(admin)
    admin.set_schemes(SLOT, [COUNT_ALL, PROMOTE])
    fake.done[0, 1] = {"nr_tried": 9, "sz_tried": 8192, "nr_applied": 2, "sz_applied": 4096}
    assert admin.command(SLOT, "update_schemes_stats")

    nothing = Applied(tried_bytes=0, bytes=0, regions=0, over_quota=0)
    promoted = Applied(tried_bytes=8192, bytes=4096, regions=2, over_quota=0)
    assert admin.applied(SLOT, 2) == [nothing, promoted]
    assert admin.applied(SLOT, 3) == [nothing, promoted]
