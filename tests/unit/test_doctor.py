# SPDX-License-Identifier: Apache-2.0
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit import trees
from tests.unit.fake_damon import FakeDamon
from tests.unit.test_targets import put
from tests.unit.test_tracepoint import FORMAT
from tierd.cli.control import main
from tierd.cli.doctor import CHECKS, Finding, Verdict, examine
from tierd.sample.kdamonds import MARK_FIRST_US

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with CXL memory and nothing amiss but what a test adds."""
    return trees.unpack("cxl-7.2", tmp_path / "root")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tierd.toml"
    path.write_text(f"[daemon]\nruntime_dir = '{tmp_path}'\n[[target]]\ncommand = 'redis-server'\n")
    return path


def write(root: Path, name: str, content: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(content)


def of(subject: str, found: list[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.subject == subject]


def test_each_subject_is_looked_at_whatever_fails(tmp_path: Path, path: Path) -> None:
    found = examine(path, tmp_path / "nothing")
    assert {finding.subject for finding in found} == {"configuration", *CHECKS}
    assert of("tiers", found)[0].verdict is FAIL
    assert of("DAMON", found)[0].verdict is FAIL


def test_a_machine_that_is_fit(root: Path, path: Path) -> None:
    write(root, "proc/sys/kernel/numa_balancing", "0\n")
    put(root, 40, "redis-server")
    found = examine(path, root, FakeDamon(root))
    assert of("configuration", found)[0].verdict is OK
    assert of("tiers", found) == [Finding(OK, "tiers", "dram (nodes 0), cxl (nodes 1)")]
    assert of("DAMON", found)[0].verdict is OK
    assert of("numa_balancing", found)[0].verdict is OK
    assert of("rivals", found) == [
        Finding(OK, "rivals", "no other daemon that moves pages runs"),
    ]
    assert of("targets", found) == [Finding(OK, "targets", "40 (redis-server)")]
    assert not [finding for finding in found if finding.verdict is FAIL]


def test_what_is_wrong_in_the_configuration_is_told(root: Path, path: Path) -> None:
    path.write_text("[demon]\n")
    first, *others = examine(path, root)
    assert first.verdict is FAIL
    assert "unknown key; did you mean daemon?" in first.message
    assert {finding.subject for finding in others} == {*CHECKS}


def test_who_else_uses_damon(root: Path, path: Path) -> None:
    damon = FakeDamon(root, kdamonds=1, processes=[77])
    damon.start_foreign(0, 77)
    _, others, full = of("DAMON", examine(path, root, damon))
    assert others.verdict is OK
    assert "process 77" in others.message
    assert (full.verdict, full.message) == (FAIL, "all of its 1 slots are others'")


def test_a_kdamond_of_ours_is_not_foreign(root: Path, path: Path) -> None:
    damon = FakeDamon(root, kdamonds=1, processes=[77])
    damon.start_foreign(0, 77)
    mark = "contexts/0/monitoring_attrs/intervals/update_us"
    damon.write(root / f"sys/kernel/mm/damon/admin/kdamonds/0/{mark}", str(MARK_FIRST_US + 5))
    assert len(of("DAMON", examine(path, root, damon))) == 1


@pytest.mark.parametrize(
    ("module", "take_over", "verdict", "step"),
    [
        ("damon_stat", False, FAIL, "set take_over = true in [damon], or echo N > "),
        ("damon_stat", True, OK, None),
        ("damon_reclaim", True, FAIL, "echo N > "),
    ],
)
def test_who_keeps_damon_for_itself(
    root: Path, path: Path, module: str, take_over: bool, verdict: Verdict, step: str | None
) -> None:
    path.write_text(f"[damon]\ntake_over = {str(take_over).lower()}\n")
    damon = FakeDamon(root)
    damon.exclusive[module] = True
    held = of("DAMON", examine(path, root, damon))[1]
    assert (held.verdict, held.message) == (verdict, f"{module} keeps everybody else out")
    assert (held.next_step or "").startswith(step or "")


@pytest.mark.parametrize(("mode", "says"), [(1, "moves pages to the CPUs"), (2, "promotes pages")])
def test_numa_balancing_is_a_rival(root: Path, path: Path, mode: int, says: str) -> None:
    write(root, "proc/sys/kernel/numa_balancing", f"{mode}\n")
    (found,) = of("numa_balancing", examine(path, root))
    assert found.verdict is WARN
    assert says in found.message


@pytest.mark.parametrize(
    ("conflicts", "mode", "verdict", "says"),
    [
        ("observe", "place", WARN, "tierd only observes meanwhile"),
        ("take_over", "place", OK, "turns it off meanwhile"),
        ("refuse", "place", FAIL, "tierd refuses"),
        ("ignore", "place", WARN, "against what tierd decides"),
        ("refuse", "observe", OK, "tierd only observes"),
    ],
)
def test_what_is_configured_about_numa_balancing_is_told(
    root: Path, path: Path, conflicts: str, mode: str, verdict: Verdict, says: str
) -> None:
    write(root, "proc/sys/kernel/numa_balancing", "1\n")
    path.write_text(f'[conflicts]\nnuma_balancing = "{conflicts}"\n[policy]\nmode = "{mode}"\n')
    (found,) = of("numa_balancing", examine(path, root))
    assert (found.verdict, says in found.message) == (verdict, True)


@pytest.mark.parametrize(
    ("mode", "tiers", "verdict", "says"),
    [
        ("0", 2, OK, "the kernel promotes beside tierd"),
        ("2", 2, OK, "the kernel promotes beside tierd"),
        ("0", 1, WARN, "no slower memory tier"),
        (None, 2, FAIL, "the kernel has none"),
    ],
)
def test_whether_the_kernel_can_cooperate_is_told(
    root: Path, path: Path, mode: str | None, tiers: int, verdict: Verdict, says: str
) -> None:
    (root / "proc/sys/kernel/numa_balancing").unlink()
    if mode is not None:
        write(root, "proc/sys/kernel/numa_balancing", f"{mode}\n")
    if tiers == 1:
        shutil.rmtree(root / "sys/devices/virtual/memory_tiering")
    path.write_text('[conflicts]\nnuma_balancing = "cooperate"\n[policy]\nmode = "place"\n')
    (found,) = of("numa_balancing", examine(path, root))
    assert (found.verdict, says in found.message) == (verdict, True)


def test_a_ring_that_perf_refuses_is_told(
    root: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("tierd.cli.doctor.Ring", refuse)
    write(root, "proc/sys/kernel/perf_event_paranoid", "3\n")
    event = "sys/kernel/tracing/events/damon/damon_aggregated"
    write(root, f"{event}/format", FORMAT)
    write(root, f"{event}/id", "767\n")
    (found,) = of("tracepoint", examine(path, root))
    assert found.verdict is WARN
    assert "perf_event_paranoid is 3" in found.message
    assert "CAP_SYS_ADMIN" in (found.next_step or "")


def test_daemons_that_move_pages_are_rivals(root: Path, path: Path) -> None:
    put(root, 50, "memtierd")
    (found,) = of("rivals", examine(path, root))
    assert found == Finding(
        WARN,
        "rivals",
        "process 50 is memtierd, which places pages too",
        "stop it: systemctl stop memtierd",
    )


def test_profiles_of_tuned(root: Path, path: Path) -> None:
    put(root, 50, "tuned")
    write(root, "etc/tuned/active_profile", "balanced\n")
    write(root, "usr/lib/tuned/balanced/tuned.conf", "[cpu]\ngovernor=powersave\n")
    assert of("rivals", examine(path, root))[0].verdict is OK
    write(root, "etc/tuned/balanced/tuned.conf", "[sysctl]\nkernel.numa_balancing=1\n")
    (found,) = of("rivals", examine(path, root))
    assert found.verdict is WARN
    assert "balanced sets numa_balancing" in found.message


def test_a_target_that_its_cpuset_bars(root: Path, path: Path) -> None:
    put(root, 40, "redis-server", cgroup="/system.slice/redis.service")
    status = root / "proc/40/status"
    status.write_text(status.read_text() + "Mems_allowed_list:\t0\n")
    _, barred = of("targets", examine(path, root))
    assert barred.verdict is WARN
    assert barred.message == "the cpuset of 40 (redis-server) bars it from cxl"


def test_the_other_daemon_of_that_name(root: Path, path: Path) -> None:
    write(root, "dev/tierd", "")
    assert "another daemon named tierd" in of("daemon", examine(path, root))[1].message


def test_the_command_tells_each_with_its_next_step(root: Path, path: Path) -> None:
    options = ["doctor", "--config", str(path), "--root", str(root)]
    shown = CliRunner().invoke(main, options, prog_name="tierctl")
    assert shown.exit_code == 1, "no DAMON below this root"
    assert "ok    tiers: dram (nodes 0), cxl (nodes 1)\n" in shown.output
    assert "\nfail  DAMON: " in shown.output
    as_json = CliRunner().invoke(main, [*options, "--json"], prog_name="tierctl")
    assert as_json.exit_code == 1
    told = {finding["subject"]: finding for finding in json.loads(as_json.output)}
    assert told["DAMON"]["verdict"] == "fail"
    assert told["DAMON"]["next_step"]
