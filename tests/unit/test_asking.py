# SPDX-License-Identifier: Apache-2.0
"""tierctl's commands that ask a daemon, over real sockets, of a daemon on a fake machine."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.unit.fake_commands import FakeCommands
from tests.unit.machine import HOT, SPAN
from tests.unit.replay import MIB
from tierd.api.app import App
from tierd.api.operations import OPERATIONS
from tierd.api.server import Endpoint, serving, unix_listener
from tierd.api.sockets import CONTROL, MONITOR
from tierd.api.view import View
from tierd.cli.control import main
from tierd.cli.heat import make_bins, make_column
from tierd.decide.guard import Guard
from tierd.decide.pins import by_name
from tierd.model import Pin
from tierd.observe.moments import load

Tierctl = Callable[..., Result]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tierd.toml"
    path.write_text(f'[daemon]\nruntime_dir = "{tmp_path}"\n')
    return path


@pytest.fixture
def tierctl(config: Path, view: View, commands: FakeCommands) -> Iterator[Tierctl]:
    """Runs tierctl against a daemon."""
    watch = [operation for operation in OPERATIONS if operation.is_for_monitoring]
    with ExitStack() as stack:
        endpoints = [
            Endpoint(
                listener=stack.enter_context(unix_listener(config.parent / name, 0o600)),
                app=App(view, commands, operations),
            )
            for name, operations in ((CONTROL, OPERATIONS), (MONITOR, watch))
        ]
        stack.enter_context(serving(endpoints))
        yield lambda *words: run(config, *words)


def run(config: Path, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--config", str(config)], prog_name="tierctl")


def test_targets_are_listed(tierctl: Tierctl) -> None:
    told = tierctl("targets")
    assert told.exit_code == 0, told.output
    heads, row = (line.split("  ") for line in told.output.splitlines())
    assert [head.strip() for head in heads if head.strip()] == [
        *("PID", "COMMAND", "DRAM", "CXL", "HITS", "PIN", "CGROUP"),
    ]
    assert [cell.strip() for cell in row if cell.strip()] == [
        *("640", "hotset", "32 MiB", "32 MiB", "100 %", "-", "-"),
    ]
    (target,) = json.loads(tierctl("targets", "--json").output)
    assert target["pid"] == HOT


def test_a_process_is_explained(tierctl: Tierctl) -> None:
    told = tierctl("explain", str(HOT)).output
    assert "process 640 (hotset): 64 MiB; 100 % of its accesses go to dram" in told
    assert "it is too cold to win back the cost of a move" in told
    assert json.loads(tierctl("explain", str(HOT), "--json").output)["pid"] == HOT


def test_a_process_whose_moves_did_not_pay_is_explained(tierctl: Tierctl, view: View) -> None:
    assert "did not pay" not in tierctl("explain", str(HOT)).output
    view.daemon.watched[HOT].guard = Guard(rests_until_s=float("inf"))
    told = tierctl("explain", str(HOT)).output
    assert "to dram; nothing is moved up for now, since that did not pay" in told


def test_heat_is_drawn(tierctl: Tierctl) -> None:
    told = tierctl("heat", str(HOT), "--for", "0.2", "--interval", "0.1", "--rows", "4")
    assert told.exit_code == 0, told.output
    *rows, legend = told.output.splitlines()
    assert [row.split()[-1] if len(row.split()) > 1 else "" for row in rows] == [
        *("███", "███", "", ""),
    ]
    assert "a row is 16 MiB; █ dram  █ cxl" in legend


def test_heat_is_told_to_programs(tierctl: Tierctl) -> None:
    words = ("heat", str(HOT), "--for", "0", "--rows", "4", "--json")
    told = json.loads(tierctl(*words).output)
    assert (told["row_bytes"], told["tiers"]) == (16 * MIB, ["dram", "cxl"])
    assert told["shares"] == [[[1, 0], [1, 0], [0, 1], [0, 1]]]
    assert [heat > 1 for heat in told["heat"][0]] == [True, True, False, False]


@pytest.mark.parametrize(("name", "begins"), [("h.png", b"\x89PNG"), ("h.svg", b"<?xml")])
def test_heat_is_drawn_as_a_picture(
    tierctl: Tierctl, tmp_path: Path, name: str, begins: bytes
) -> None:
    told = tierctl("heat", str(HOT), "--for", "0", "--output", str(tmp_path / name))
    assert told.exit_code == 0, told.output
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_picture_of_an_unknown_kind_is_refused(tierctl: Tierctl, tmp_path: Path) -> None:
    told = tierctl("heat", str(HOT), "--for", "0", "--output", str(tmp_path / "h.doc"))
    assert told.exit_code == 1
    assert "h.doc" in told.output


def test_bins_leave_out_what_is_not_mapped() -> None:
    def part(start: int, end: int, heat: float, fast: int) -> dict[str, object]:
        resident = {"dram": fast, "cxl": end - start - fast}
        return {"start": start, "end": end, "heat": heat, "resident": resident}

    parts = [part(0x1000, 0x3000, 4.0, 0x2000), part(0x9000, 0xB000, 8.0, 0x1000)]
    bins = make_bins({"pid": 1, "ranges": parts}, 4)
    assert [bins.address(row) for row in range(4)] == [0x1000, 0x2000, 0x9000, 0xA000]
    column = make_column({"ranges": parts}, bins, ["dram", "cxl"], 0.0)
    assert column.heat.tolist() == [4, 4, 8, 8]
    assert column.shares.tolist() == [[1, 0], [1, 0], [0.5, 0.5], [0.5, 0.5]]
    later = make_column({"ranges": parts[:1]}, bins, ["dram", "cxl"], 1.0)
    assert later.heat.tolist() == [4, 4, 0, 0], "what was unmapped since is cold"
    grown = make_column({"ranges": [*parts, part(0xF000, 0x1F000, 9, 0)]}, bins, ["dram", "cxl"], 1)
    assert grown.heat.tolist() == column.heat.tolist(), "what was mapped since is left out"


def test_top_shows_a_screen_where_there_is_no_terminal(tierctl: Tierctl) -> None:
    told = tierctl("top", "--interval", "0.1")
    assert told.exit_code == 0, told.output
    assert told.output.startswith("tierd 1: place   hits 100.0 %   waiting for memory ")
    assert "dram       [######......" in told.output
    assert "640  hotset" in told.output
    document = json.loads(tierctl("top", "--interval", "0.1", "--json").output)
    assert document["hit_percent"] == pytest.approx(100, abs=0.5)
    assert document["moved_per_s"] == [{"from": "cxl", "to": "dram", "pages": 0.0}]


def test_events_are_told(tierctl: Tierctl) -> None:
    lines = tierctl("events").output.splitlines()
    assert "target.new    watching process 640 (hotset)" in lines[0]
    last = tierctl("events", "-n", "1", "--json").output
    assert json.loads(last)["kind"] == "moved"


def test_a_pause_and_its_end(tierctl: Tierctl, commands: FakeCommands) -> None:
    assert tierctl("pause").exit_code == 0
    assert commands.daemon.paused
    assert tierctl("resume").exit_code == 0
    assert not commands.daemon.paused


def test_pins(tierctl: Tierctl, commands: FakeCommands) -> None:
    watched = commands.daemon.watched[HOT]
    for words, pin in (
        (["pin", "640"], Pin.FASTEST),
        (["pin", "640", "--here"], Pin.HERE),
        (["unpin", "640"], None),
    ):
        told = tierctl(*words)
        assert told.exit_code == 0, told.output
        assert watched.pin is pin


def test_pins_of_ranges(tierctl: Tierctl, commands: FakeCommands) -> None:
    def spelled(first: int, behind: int) -> str:
        return f"{SPAN.start + first:x}-{SPAN.start + behind:x}"

    told = tierctl("pin", "640", "--range", spelled(4100, 12000))
    assert told.output == f"process 640: {spelled(4096, 12288)} is pinned: fastest\n"
    told = tierctl("pin", "640", "--here", "--range", spelled(4096, 8192))
    assert told.exit_code == 1
    assert f"{spelled(4096, 8192)} is pinned otherwise" in told.output
    tierctl("pin", "640", "--here", "--range", f"0x{SPAN.start + 16384:X}-{SPAN.stop:x}")
    lines = tierctl("explain", "640").output
    assert "64 MiB, pinned: fastest 8 KiB, here 64.0 MiB; " in lines
    assert re.search(rf"^{spelled(4096, 12288)} +8 KiB +fastest +operator$", lines, re.MULTILINE)
    told = tierctl("unpin", "640", "--range", spelled(4096, 8192))
    assert told.output.splitlines() == [
        f"process 640: {spelled(4096, 8192)} is pinned no more",
        "ranges that are pinned still: 2; tierctl explain 640 lists them",
    ]
    assert tierctl("unpin", "640").output == "process 640 is pinned no more\n"
    assert commands.daemon.targets.pins(HOT) == []


def test_an_operator_pins_what_the_configuration_does_too(
    tierctl: Tierctl, commands: FakeCommands
) -> None:
    part, spelled = range(SPAN.start, SPAN.start + 8192), f"{SPAN.start:x}-{SPAN.start + 8192:x}"
    watched = commands.daemon.watched[HOT]
    watched.named = by_name([(part.start, part.stop, "[heap]")], {"[heap]": Pin.HERE})
    told = tierctl("pin", "640", "--range", spelled)
    assert told.output == f"process 640: {spelled} is pinned: fastest\n"
    assert "pinned: fastest 8 KiB;" in tierctl("explain", "640").output
    assert tierctl("unpin", "640").output.splitlines()[1:] == [
        "ranges that are pinned still: 1; tierctl explain 640 lists them"
    ]


@pytest.mark.parametrize(
    "part", ["1000", "2000-1000", "1000-1000", "x-y", f"{1 << 57:x}-{1 << 58:x}"]
)
def test_what_is_no_range_of_addresses_is_refused(tierctl: Tierctl, part: str) -> None:
    told = tierctl("pin", "640", "--range", part)
    assert told.exit_code == 2
    assert f"'{part}' is no range such as 7f10c0000000-7f10c0400000" in told.output


@pytest.mark.parametrize("words", [["explain"], ["heat"], ["pin"], ["unpin"]])
def test_what_is_no_target_is_told(tierctl: Tierctl, words: list[str]) -> None:
    told = tierctl(*words, "1")
    assert told.exit_code == 1
    assert "tierctl: error: process 1 is no target\ntierctl: hint: tierctl targets" in told.output


def test_a_drain_is_told(tierctl: Tierctl) -> None:
    told = tierctl("drain", "1")
    assert told.exit_code == 0, told.output
    assert "node 1 is drained: 7 pages moved; pages that could not be moved: 2 busy" in told.output
    assert json.loads(tierctl("drain", "1", "--json").output)["left"] == {"busy": 2}
    assert tierctl("drain", "1", "--undo").output == "node 1 is used again\n"


def test_keys_are_set(tierctl: Tierctl, commands: FakeCommands) -> None:
    told = tierctl("set", "policy.mode=observe", "policy.hysteresis=2.5", "damon.cpu_percent=")
    assert told.output.splitlines()[0] == 'policy.mode: null -> "observe"'
    assert commands.was_set == [
        {"policy": {"mode": "observe", "hysteresis": 2.5}, "damon": {"cpu_percent": None}}
    ]


def test_what_is_set_can_be_kept(tierctl: Tierctl, config: Path) -> None:
    kept = config.with_name("tierd.toml.d") / "90-tierctl.toml"
    told = tierctl("set", "--persist", "policy.mode=observe", "policy.payback=3")
    assert told.exit_code == 0, told.output
    assert tomllib.loads(kept.read_text()) == {"policy": {"mode": "observe", "payback": 3}}
    tierctl("set", "--persist", "policy.mode=")
    assert tomllib.loads(kept.read_text()) == {"policy": {"payback": 3}}
    assert [file.name for file in kept.parent.iterdir()] == [kept.name]


def test_what_would_be_wrong_is_neither_kept_nor_set(
    tierctl: Tierctl, config: Path, commands: FakeCommands
) -> None:
    told = tierctl("set", "--persist", "policy.long_s=1", "policy.short_s=5")
    assert told.exit_code == 1
    assert "long_s: must be above short_s" in told.output
    assert not config.with_name("tierd.toml.d").exists()
    assert commands.was_set == []


@pytest.mark.parametrize("setting", ["mode=observe", "policy.mode", "=1", "policy.=1"])
def test_a_setting_of_another_form_is_refused(tierctl: Tierctl, setting: str) -> None:
    told = tierctl("set", setting)
    assert told.exit_code == 2
    assert "TABLE.KEY=VALUE" in told.output


def test_versions(tierctl: Tierctl) -> None:
    told = json.loads(tierctl("version", "--json").output)
    assert told["tierctl"] == told["tierd"]


@pytest.mark.parametrize(
    "words", [["targets"], ["explain", "1"], ["top"], ["events"], ["pause"], ["set", "a.b=1"]]
)
def test_without_a_daemon_that_is_told(config: Path, words: list[str]) -> None:
    told = run(config, *words)
    assert told.exit_code == 1
    assert f"no tierd is running on {config.parent}" in told.output
    assert json.loads(run(config, "version", "--json").output)["tierd"] is None


def test_what_is_recorded_can_be_replayed(tierctl: Tierctl, tmp_path: Path) -> None:
    path = tmp_path / "load.tierd"
    told = tierctl("record", str(path), "--for", "1.5")
    assert told.exit_code == 0, told.output
    assert re.fullmatch(r"2 s recorded, [\d.]+ (K?i)?B\n", told.output)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load(path).moments
    again = tierctl("record", str(path), "--for", "1")
    assert again.exit_code == 1
    assert f"{path} is there already" in again.output


def test_a_recording_ends_at_its_size(tierctl: Tierctl, tmp_path: Path) -> None:
    path = tmp_path / "load.tierd"
    told = tierctl("record", str(path), "--size", "1K")
    assert told.exit_code == 0, told.output
    assert "it has reached 1 KiB" in told.output
    assert path.stat().st_size <= 1024


def test_one_records_at_a_time(tierctl: Tierctl, commands: FakeCommands, tmp_path: Path) -> None:
    commands.record()
    told = tierctl("record", str(tmp_path / "load.tierd"))
    assert told.exit_code == 1
    assert "a recording is being made already" in told.output
    assert not (tmp_path / "load.tierd").exists()
