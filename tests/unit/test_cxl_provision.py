# SPDX-License-Identifier: Apache-2.0
"""What is done by itself with new CXL devices."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from tests.unit.fake_cxl import FakeCxl
from tests.unit.test_control import keys
from tierd.cli import cxl, cxl_provision
from tierd.cli.control import main
from tierd.config import CxlConfig, Provision
from tierd.kernel import cxl_regions
from tierd.model import Online
from tierd.provision import rule
from tierd.provision.create import look, open_journal
from tierd.provision.plan import Request

REPOSITORY = Path(__file__).parents[2]
VOLATILE = 'provision = "volatile"\n'


class Machine:
    """An imagined machine with CXL memory, and tierctl on it."""

    def __init__(self, fake: FakeCxl, folder: Path) -> None:
        self.fake, self.state = fake, folder / "state"
        self._settings = folder / "tierd.toml"
        self.configure("")

    def configure(self, of_cxl: str) -> None:
        self._settings.write_text(f'[daemon]\nstate_dir = "{self.state}"\n[cxl]\n{of_cxl}')

    def provision(self, *words: str) -> Result:
        options = ["--root", str(self.fake.root), "--config", str(self._settings)]
        command = ["cxl", "provision", *words, *options]
        return CliRunner().invoke(main, command, prog_name="tierctl")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(FakeCxl(tmp_path / "root"), tmp_path)
    monkeypatch.setattr(cxl, "KernelFiles", lambda: found.fake)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(cxl_regions, "SETTLE_S", 0.0)
    return found


def echoes(output: str) -> list[str]:
    return re.findall(r"^echo .*", output, re.MULTILINE)


def test_by_default_nothing_is_done(machine: Machine) -> None:
    left = machine.provision("mem0")
    assert left.exit_code == 0
    assert left.output == 'mem0 is left as it is: provision is "no" in [cxl]\n'
    assert machine.fake.writes == []


@pytest.mark.parametrize("online", list(Online))
def test_a_new_device_becomes_memory_once(machine: Machine, online: Online) -> None:
    machine.configure(f'{VOLATILE}online = "{online}"\n')
    before = machine.fake.footprint()
    dry = machine.provision("mem0", "--dry-run")
    assert (dry.exit_code, machine.fake.footprint()) == (0, before)
    made = machine.provision("mem0")
    assert made.exit_code == 0, made.output
    assert len(echoes(made.output)) > 8
    assert echoes(made.output) == echoes(dry.output)
    state = "offline" if online is Online.NONE else "online"
    assert set(machine.fake.blocks().values()) == {state}
    again = machine.provision("mem0")
    assert (again.exit_code, again.output) == (
        0,
        "mem0 is left as it is: it is in use already: decoder2.0 (region1)\n",
    )


def test_its_json_has_the_documented_keys(machine: Machine) -> None:
    text = (REPOSITORY / "docs/cxl.md").read_text().split("## JSON of create")[1].split("## ")[0]
    of_create = set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))
    left = json.loads(machine.provision("mem0", "--json").output)
    assert left == {"left": 'provision is "no" in [cxl]', "made": None}
    machine.configure(VOLATILE)
    made: Any = json.loads(machine.provision("mem0", "--json").output)
    assert (set(made), made["left"]) == (set(left), None)
    assert keys(made["made"]) == of_create


def test_none_is_interleaved_by_itself(tmp_path: Path, machine: Machine) -> None:
    """The only window here is interleaved over both devices, so it takes neither alone."""
    machine.fake = FakeCxl(tmp_path / "two", "cxl-interleaved")
    machine.configure(VOLATILE)
    refused = machine.provision("mem0")
    assert refused.exit_code == 1
    assert "decoder0.0 takes 2 devices" in refused.stderr
    assert machine.fake.writes == []


def test_a_device_of_persistent_memory_is_left_to_people(machine: Machine) -> None:
    settings, found = CxlConfig(provision=Provision.VOLATILE), look(machine.fake.root)
    assert rule.request("mem0", settings, found) == Request(memdevs=("mem0",))
    (device,) = found.memdevs
    mixed = replace(found, memdevs=(replace(device, pmem_bytes=256 << 20),))
    told = rule.request("mem0", settings, mixed)
    assert told == "it has persistent memory, so it is for people to name: tierctl cxl create"


def test_a_device_that_is_not_there_is_told(machine: Machine) -> None:
    machine.configure(VOLATILE)
    refused = machine.provision("mem9")
    assert refused.exit_code == 1
    assert "there is no CXL device mem9; there are mem0" in refused.stderr


def test_it_waits_while_others_make_regions(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.configure(VOLATILE)
    other = open_journal(machine.state, machine.fake.root, machine.fake)
    monkeypatch.setattr(time, "sleep", lambda _: other.close())
    made = machine.provision("mem0")
    assert made.exit_code == 0, made.output
    assert machine.fake.blocks()


def test_it_does_not_wait_for_ever(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.configure(VOLATILE)
    monkeypatch.setattr(cxl_provision, "WITHIN_S", 0.0)
    with open_journal(machine.state, machine.fake.root, machine.fake):
        refused = machine.provision("mem0")
    assert refused.exit_code == 1
    assert "another tierctl is making or draining a CXL region" in refused.stderr
    assert machine.fake.writes == []


def test_only_root_may(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.configure(VOLATILE)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refused = machine.provision("mem0")
    assert "tierctl cxl provision needs root" in refused.stderr


def test_the_shell_completes_devices(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = ShellComplete(main, {}, "tierctl", "_TIERCTL_COMPLETE")
    monkeypatch.setattr(cxl, "read_memdevs", lambda: look(machine.fake.root).memdevs)
    found = complete.get_completions(["cxl", "provision"], "mem")
    assert [item.value for item in found] == ["mem0"]
