# SPDX-License-Identifier: Apache-2.0
"""What is measured, and what becomes of it. The measuring itself is in tests/kernel."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit import trees
from tests.unit.test_control import keys
from tierd.cli import control
from tierd.cli import measure as measure_command
from tierd.config import load, parse
from tierd.discover import speed
from tierd.discover.speed import Method, Speed
from tierd.discover.topology import NodeUse, discover
from tierd.errors import TierdError
from tierd.kernel.cgroup_room import read_room_bytes
from tierd.kernel.cpus import is_virtual, one_of_each_core, read_last_cache_bytes
from tierd.kernel.text import UnexpectedContent
from tierd.model import Node, NodeId, Topology

MIB, GIB = 1 << 20, 1 << 30
CPUS = "sys/devices/system/cpu"


def put(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def machine(root: Path, *, cgroup: str = "/a/b", allowed: str = "0-3") -> Path:
    """A process on a machine of two threads a core, with caches of 16 MiB."""
    for cpu in range(4):
        put(root, f"{CPUS}/cpu{cpu}/cache/index0/size", "32K\n")
        put(root, f"{CPUS}/cpu{cpu}/cache/index3/size", "16384K\n")
        put(root, f"{CPUS}/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}\n")
    process = f"proc/{os.getpid()}"
    stat = f"{os.getpid()} (pytest) S 1 " + " ".join(["0"] * 48) + "\n"
    put(root, f"{process}/stat", stat)
    put(root, f"{process}/comm", "pytest\n")
    status = f"Tgid:\t{os.getpid()}\nUid:\t0\t0\t0\t0\nMems_allowed_list:\t{allowed}\n"
    put(root, f"{process}/status", status)
    put(root, f"{process}/cgroup", f"0::{cgroup}\n")
    return root


def two_tiers(tmp_path: Path) -> Topology:
    return discover((), trees.unpack("cxl-two-tiers-7.2", tmp_path / "tree"))


def on_our_cpus(nodes: Sequence[Node]) -> list[Node]:
    """As the nodes, the first of which has the CPUs that this process may run on."""
    return [replace(nodes[0], cpus=tuple(os.sched_getaffinity(0))), *nodes[1:]]


def with_room(room_bytes: int, nodes: Sequence[int] = (0, 2, 3)) -> dict[NodeId, NodeUse]:
    use = NodeUse(free_bytes=room_bytes, room_bytes=room_bytes)
    return {NodeId(node): use for node in nodes}


def a_speed(node: int, latency_ns: float, read_mbps: float = 20_000) -> Speed:
    method = Method(node=NodeId(node), from_node=NodeId(0), cpus=(0, 1), size_bytes=64 * MIB)
    return Speed(
        method=method,
        huge_bytes=60 * MIB,
        read_latency_ns=latency_ns,
        loaded_latency_ns=2 * latency_ns,
        read_bandwidth_mbps=read_mbps,
        write_bandwidth_mbps=read_mbps / 2,
    )


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert read_last_cache_bytes(0, root) == 16 * MIB
    assert read_last_cache_bytes(9, root) is None
    put(root, f"{CPUS}/cpu0/cache/index3/size", "huge\n")
    with pytest.raises(UnexpectedContent):
        read_last_cache_bytes(0, root)


def test_one_cpu_of_each_core(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert one_of_each_core([3, 2, 1, 0], root) == (0, 1)
    assert one_of_each_core([2, 3], root) == (2, 3)
    assert one_of_each_core([7], root) == (7,)


@pytest.mark.parametrize(
    ("flags", "expected"), [("fpu hypervisor lm", True), ("fpu lm", False), ("hypervisors", False)]
)
def test_a_hypervisor_is_told_by_its_flag(tmp_path: Path, flags: str, expected: bool) -> None:
    put(tmp_path, "proc/cpuinfo", f"processor\t: 0\nflags\t\t: fpu {flags}\nbugs\t\t:\n")
    assert is_virtual(tmp_path) is expected


def test_the_narrowest_limit_of_a_cgroup_counts(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/a"
    assert read_room_bytes("/a/b", tmp_path) is None
    put(tmp_path, f"{folder}/b/memory.max", "max\n")
    put(tmp_path, f"{folder}/b/memory.high", f"{900 * MIB}\n")
    put(tmp_path, f"{folder}/b/memory.current", f"{100 * MIB}\n")
    assert read_room_bytes("/a/b", tmp_path) == 800 * MIB
    put(tmp_path, f"{folder}/memory.max", f"{500 * MIB}\n")
    put(tmp_path, f"{folder}/memory.current", f"{450 * MIB}\n")
    assert read_room_bytes("/a/b", tmp_path) == 50 * MIB
    assert read_room_bytes("/", tmp_path) is None
    put(tmp_path, f"{folder}/memory.current", f"{501 * MIB}\n")
    assert read_room_bytes("/a/b", tmp_path) == 0


def test_buffers_are_eight_caches_or_a_quarter_of_the_room(tmp_path: Path) -> None:
    root, nodes = machine(tmp_path), on_our_cpus(two_tiers(tmp_path).nodes)
    for room, size in ((4 * GIB, 128 * MIB), (253 * MIB, 62 * MIB), (192 * MIB, 48 * MIB)):
        found = list(speed.methods(nodes, with_room(room), root=root))
        assert all(isinstance(method, Method) for method in found), found
        assert [(m.node, m.from_node, m.size_bytes) for m in found if isinstance(m, Method)] == [
            (node, 0, size) for node in (0, 2, 3)
        ]


def test_a_node_without_room_is_refused(tmp_path: Path) -> None:
    root, nodes = machine(tmp_path), on_our_cpus(two_tiers(tmp_path).nodes)
    use = with_room(4 * GIB) | with_room(191 * MIB, (2,))
    near, refused, far = speed.methods(nodes, use, root=root)
    assert isinstance(near, Method)
    assert isinstance(far, Method)
    assert isinstance(refused, TierdError)
    assert "node 2 lacks room: a buffer of 48 MiB" in str(refused)
    (refused,) = speed.methods(nodes, {}, [NodeId(3)], root=root)
    assert "node 3 lacks room" in str(refused)


def test_a_cgroups_limit_is_kept(tmp_path: Path) -> None:
    root, nodes = machine(tmp_path), on_our_cpus(two_tiers(tmp_path).nodes)
    put(root, "sys/fs/cgroup/a/memory.max", f"{300 * MIB}\n")
    put(root, "sys/fs/cgroup/a/memory.current", "0\n")
    (method,) = speed.methods(nodes, with_room(4 * GIB), [NodeId(2)], root=root)
    assert isinstance(method, Method)
    assert method.size_bytes == 74 * MIB


@pytest.mark.parametrize(
    ("node", "size_bytes", "message"),
    [
        (2, None, "node 2 is not in this process's cpuset"),
        (7, None, "there is no node 7 with memory; there are 0, 2, 3"),
        (0, 2 * GIB, "node 0 lacks room: a buffer of 2048 MiB"),
        (0, 47 * MIB, "46 MiB are too few: the last cache has 16 MiB"),
    ],
)
def test_what_cannot_be_measured_is_told(
    tmp_path: Path, node: int, size_bytes: int | None, message: str
) -> None:
    root, nodes = machine(tmp_path, allowed="0,3"), on_our_cpus(two_tiers(tmp_path).nodes)
    (error,) = speed.methods(nodes, with_room(4 * GIB), [NodeId(node)], size_bytes, root)
    assert isinstance(error, TierdError)
    assert message in str(error)


def test_the_nearest_cpus_that_are_ours_are_taken(tmp_path: Path) -> None:
    """Those of the node itself are others'."""
    root, nodes = machine(tmp_path), on_our_cpus(two_tiers(tmp_path).nodes)
    nodes[2] = replace(nodes[2], cpus=(1000,), distances={NodeId(0): 20, NodeId(3): 10})
    (method,) = speed.methods(nodes, with_room(4 * GIB), [NodeId(3)], root=root)
    assert isinstance(method, Method)
    assert method.from_node == 0
    assert 1000 not in method.cpus


def test_tiers_by_what_was_measured(tmp_path: Path) -> None:
    """Where firmware tells nothing the kernel has both devices in one tier."""
    found = discover((), trees.unpack("cxl-two-regions", tmp_path))
    assert [tier.nodes for tier in found.tiers] == [(0,), (1, 2)]
    measured = [a_speed(0, 90.4), a_speed(1, 600), a_speed(2, 250, 9_000)]
    tiers = speed.rank(found.nodes, measured)
    assert [(t.name, t.nodes, t.latency_ns, t.bandwidth_mbps) for t in tiers] == [
        ("dram", (0,), 90, 20_000),
        ("cxl", (2,), 250, 9_000),
        ("cxl1", (1,), 600, 20_000),
    ]
    alike = [a_speed(0, 90), a_speed(1, 250), a_speed(2, 270)]
    assert [(t.nodes, t.latency_ns) for t in speed.rank(found.nodes, alike)] == [
        ((0,), 90),
        ((1, 2), 270),
    ]


def test_declared_tiers_keep_their_nodes(tmp_path: Path) -> None:
    found = two_tiers(tmp_path)
    declared = parse(
        '[[tier]]\nname = "fast"\nkind = "dram"\nnodes = [0]\nlatency_ns = 1\n'
        '[[tier]]\nname = "slow"\nkind = "cxl"\nnodes = [2, 3]\n',
        "tierd.toml",
    ).tiers
    tiers = speed.declare(declared, found.nodes, [a_speed(0, 100), a_speed(3, 300)])
    assert [(tier.name, tier.latency_ns) for tier in tiers] == [("fast", 100), ("slow", 300)]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose speeds are known beforehand, and its empty configuration."""
    found = two_tiers(tmp_path)
    speeds = {0: a_speed(0, 90), 2: a_speed(2, 300), 3: a_speed(3, 700)}

    def methods(nodes: object, use: object, only: Sequence[int], *_: object) -> list[Method]:
        return [speeds[node].method for node in only or speeds]

    monkeypatch.setattr(measure_command, "discover", lambda *_: found)
    monkeypatch.setattr(speed, "methods", methods)
    monkeypatch.setattr(speed, "measure", lambda method, *_, loaded: speeds[method.node])
    path = tmp_path / "tierd.toml"
    path.touch()
    return path


def run(config: Path, *options: str) -> tuple[int, str]:
    arguments = ["measure", "--config", str(config), *options]
    done = CliRunner().invoke(control.main, arguments)
    return done.exit_code, done.output


def test_the_table_has_both_figures(measured: Path) -> None:
    code, output = run(measured)
    assert code == 0, output
    lines = [line.split("  ") for line in output.splitlines()[:4]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[2] == [
        *("2", "cxl", "0", "300 ns", "600 ns", "20000 MB/s", "10000 MB/s"),
        *("267 ns", "10240 MB/s", "10240 MB/s"),
    ]
    assert "4 MiB of it in small pages" in output


def test_json_has_the_documented_keys_and_no_others(measured: Path) -> None:
    document = Path(__file__).parents[2] / "docs/measure.md"
    documented = set(re.findall(r"^\| `([^`]+)` \|", document.read_text(), re.MULTILINE))
    code, output = run(measured, "--json")
    assert code == 0, output
    assert keys(json.loads(output)) == documented


def test_what_is_saved_is_read_back(measured: Path) -> None:
    drop_in = measured.with_name("tierd.toml.d") / "50-measured.toml"
    code, shown = run(measured, "--save", "--dry-run")
    assert code == 0, shown
    assert not drop_in.exists()
    for _ in range(2):  # what it has written itself it may replace
        code, output = run(measured, "--save")
        assert code == 0, output
    assert drop_in.read_text() in shown
    tiers = load(measured).tiers
    assert [(t.name, t.kind, t.nodes, t.latency_ns, t.bandwidth_mbps) for t in tiers] == [
        ("dram", "dram", (0,), 90, 20_000),
        ("cxl", "cxl", (2,), 300, 20_000),
        ("cxl1", "cxl", (3,), 700, 20_000),
    ]
    assert [path.name for path in drop_in.parent.iterdir()] == [drop_in.name]


def test_the_operators_tiers_stay_as_they_are(measured: Path) -> None:
    declared = '[[tier]]\nname = "mine"\nkind = "dram"\nnodes = [0, 2]\n'
    measured.write_text(declared)
    code, output = run(measured, "--save")
    assert code == 1
    assert f"{measured} has [[tier]] tables: they stay as they are" in output
    assert 'to "mine", latency_ns = 300, bandwidth_mbps = 40000' in output
    assert measured.read_text() == declared
    assert not measured.with_name("tierd.toml.d").exists()


def test_dry_run_is_of_save(measured: Path) -> None:
    assert run(measured, "--dry-run")[0] == 2


def test_the_plot_is_a_picture(measured: Path, tmp_path: Path) -> None:
    code, output = run(measured, "--plot", str(tmp_path / "speed.png"))
    assert code == 0, output
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
