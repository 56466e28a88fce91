# SPDX-License-Identifier: Apache-2.0
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tests.unit import trees
from tierd.cli import text
from tierd.cli.control import main
from tierd.cli.errors import Commands
from tierd.errors import UnsupportedKernel
from tierd.kernel.text import parse_ids

DOCUMENT = Path(__file__).parents[2] / "docs/topology.md"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), prog_name="tierctl")


def test_tables_of_a_cxl_machine(tmp_path: Path) -> None:
    result = run("topology", "--root", trees.unpack("cxl-7.2", tmp_path))
    assert result.exit_code == 0
    assert result.output == (
        "TIER  KIND  NODES  CAPACITY  USED            ROOM      LATENCY  BANDWIDTH\n"
        "dram  dram  0      1.86 GiB  191 MiB (10 %)  1.60 GiB  unknown  unknown\n"
        "cxl   cxl   1      512 MiB   0 B (0 %)       506 MiB   unknown  unknown\n"
        "\n"
        "NODE  TIER  CAPACITY  FREE      CPUS  BACKED BY           HMAT READ  KERNEL TIER\n"
        "0     dram  1.86 GiB  1.67 GiB  0-1   dram                unknown    4\n"
        "1     cxl   512 MiB   512 MiB   none  cxl (mem0, dax0.0)  unknown    22\n"
        "\n"
        "CXL DEVICE  RAM      PMEM  SERIAL  NODE  FIRMWARE\n"
        "mem0        512 MiB  0 B   0x0     none  BWFW VERSION 00\n"
        "\n"
        "CXL REGION  SIZE     MODE  INTERLEAVED OVER  DAX            STATE\n"
        "region0     512 MiB  ram   mem0              dax0.0 (kmem)  committed\n"
    )


def test_warnings_come_last(tmp_path: Path) -> None:
    result = run("topology", "--root", trees.unpack("flat", tmp_path))
    assert result.output.splitlines()[-1].startswith("warning: this machine has no second")


def test_hmat_figures_are_shown(tmp_path: Path) -> None:
    root = trees.unpack("slow-node-7.2", tmp_path)
    for node, latency, bandwidth in ((0, "90", "80000"), (1, "250", "20000")):
        folder = root / f"sys/devices/system/node/node{node}/access1/initiators"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "read_latency").write_text(latency)
        (folder / "read_bandwidth").write_text(bandwidth)
    output = run("topology", "--root", root).output
    assert re.search(r"^pmem .* 250 ns +20000 MB/s$", output, re.MULTILINE)
    assert re.search(r"^1 .* 250 ns, 20000 MB/s +22$", output, re.MULTILINE)


def test_tiers_of_a_given_configuration(tmp_path: Path) -> None:
    path = tmp_path / "tierd.toml"
    path.write_text("[[tier]]\nname = 'all'\nkind = 'dram'\nnodes = [0, 1]\n")
    result = run("topology", "--config", path, "--root", trees.unpack("cxl-7.2", tmp_path))
    assert re.search(r"^all +dram +0-1 ", result.output, re.MULTILINE)


def keys(value: Any, above: str = "") -> set[str]:
    if isinstance(value, list):
        return set().union(*(keys(item, f"{above}[]") for item in value))
    if not isinstance(value, dict):
        return set()
    if above.endswith("distances"):
        return set()
    inside = {f"{above}.{key}".lstrip("."): item for key, item in value.items()}
    return set(inside).union(*(keys(item, key) for key, item in inside.items()))


def test_json_has_the_documented_keys_and_no_others(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    for access in ("access0", "access1"):
        folder = root / f"sys/devices/system/node/node0/{access}/initiators"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "read_latency").write_text("90")
    result = run("topology", "--json", "--root", root)
    assert result.exit_code == 0
    documented = set(re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert keys(json.loads(result.output)) == documented


def test_configuration_that_is_refused_ends_with_1_and_each_problem(tmp_path: Path) -> None:
    path = tmp_path / "tierd.toml"
    path.write_text("[policy]\nmode = 1\n[demon]\n")
    result = run("topology", "--config", path)
    assert result.exit_code == 1
    assert result.stdout == ""
    first, second = result.stderr.splitlines()
    assert first.startswith(f"tierctl: error: {path}:2: policy.mode: must be one of")
    assert second.startswith(f"tierctl: error: {path}:3: demon: unknown key")


def test_garbled_kernel_file_ends_with_1_and_a_hint(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    (root / "proc/zoneinfo").write_text("?")
    result = run("topology", "--root", root)
    assert result.exit_code == 1
    error, hint = result.stderr.splitlines()
    assert re.fullmatch(r"tierctl: error: .*/proc/zoneinfo holds '\?', not memory zones", error)
    assert hint.startswith("tierctl: hint: report this")


@pytest.mark.parametrize("arguments", [("topologi",), ("topology", "--jsno"), ("topology", "x")])
def test_wrong_command_line_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (UnsupportedKernel("no DAMON", hint="boot"), ["t: error: no DAMON", "t: hint: boot"]),
        (PermissionError(13, "Permission denied", "/x"), ["t: error: /x: Permission denied"]),
        (OSError("strange"), ["t: error: strange"]),
    ],
)
def test_errors_of_a_command(error: Exception, lines: list[str]) -> None:
    @click.command()
    def fail() -> None:
        raise error

    result = CliRunner().invoke(Commands(commands=[fail]), ["fail"], prog_name="t")
    assert (result.exit_code, result.stderr.splitlines()) == (1, lines)


def test_other_exceptions_are_bugs_and_keep_their_traceback() -> None:
    @click.command()
    def fail() -> None:
        raise KeyError("bug")

    result = CliRunner().invoke(Commands(commands=[fail]), ["fail"])
    assert isinstance(result.exception, KeyError)


@pytest.mark.parametrize(
    ("size", "spelled"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.50 KiB"), (200 << 20, "200 MiB"),
     ((1 << 30) * 12 + (1 << 29), "12.5 GiB"), (1 << 60, "1048576 TiB")],
)  # fmt: skip
def test_amounts(size: int, spelled: str) -> None:
    assert text.amount(size) == spelled


@given(st.sets(st.integers(0, 300)))
def test_ids_are_spelled_as_the_kernel_does(numbers: set[int]) -> None:
    assert parse_ids(text.ids(numbers)) == tuple(sorted(numbers))


def test_bash_completes_commands_by_what_is_printed() -> None:
    script = run("completion", "bash").output
    typed = "COMP_WORDS=(tierctl co); COMP_CWORD=1; _tierctl_completion tierctl"
    path = f"PATH={Path(sys.executable).parent}:$PATH"
    shell = ["bash", "-c", f'{path}\n{script}\n{typed}; echo "${{COMPREPLY[@]}}"']
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["completion", "config"], done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_given_a_script(shell: str) -> None:
    assert "_TIERCTL_COMPLETE" in run("completion", shell).output


def test_a_command_is_imported_alone() -> None:
    code = """
import sys
from tierd.cli.control import main
main(["completion", "bash"], standalone_mode=False)
assert "tierd.cli.completion" in sys.modules
assert not {"numpy", "tierd.config", "tierd.cli.status"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
