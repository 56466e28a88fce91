# SPDX-License-Identifier: Apache-2.0
"""tierctl cxl list, on captured machines."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.unit import trees
from tests.unit.test_control import keys
from tests.unit.test_topology import real
from tierd.cli.control import main
from tierd.discover.fabric import read_fabric
from tierd.kernel import cxl
from tierd.kernel.text import UnexpectedContent

DOCUMENT = Path(__file__).parents[2] / "docs/cxl.md"
CXL_TREES = [name for name in trees.NAMES if name.startswith("cxl")]
AER = "Undefined 0\nDLP 2\nTOTAL_ERR_{} {}\n"


def listed(root: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["cxl", "list", "--root", str(root), *options])


def document(root: Path) -> Any:
    result = listed(root, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_tree_is_that_of_the_document(tmp_path: Path) -> None:
    shown = listed(trees.unpack("cxl-7.2", tmp_path)).output
    indented = "".join(f"    {line}\n" for line in shown.splitlines())
    assert indented in DOCUMENT.read_text()


def test_interleaved_devices_are_told_in_their_order(tmp_path: Path) -> None:
    shown = listed(trees.unpack("cxl-interleaved", tmp_path)).output
    assert "region0: ram, 512 MiB, 2 ways of 256 B, committed" in shown
    assert "├─ over mem0 (decoder3.0), mem1 (decoder4.0)" in shown
    assert "over bridges 12, 52" in shown


@pytest.mark.parametrize("name", ["flat", "numa", "slow-node-7.2"])
def test_a_machine_without_cxl(tmp_path: Path, name: str) -> None:
    """A region and a dax device of an NVDIMM are not CXL's."""
    root = trees.unpack(name, tmp_path)
    assert "knows of no CXL memory device" in listed(root).output
    assert set(map(len, document(root).values())) == {0}, "no list has anything"


@pytest.mark.parametrize("name", CXL_TREES)
def test_json_has_the_documented_keys_and_no_others(tmp_path: Path, name: str) -> None:
    told = DOCUMENT.read_text().partition("## JSON of create")[0]
    documented = set(re.findall(r"^\| `([^`]+)` \|", told, re.MULTILINE))
    assert keys(document(trees.unpack(name, tmp_path))) == documented


def test_what_a_root_decoder_calls_a_device(tmp_path: Path) -> None:
    found = document(trees.unpack("cxl-interleaved", tmp_path))
    roots = [decoder for decoder in found["decoders"] if decoder["kind"] == "root"]
    assert [(root["targets"], root["modes"]) for root in roots] == [(["12", "52"], ["ram", "pmem"])]
    assert [memdev["bridge"] for memdev in found["memdevs"]] == ["12", "52"]
    assert [memdev["route"][-1][:8] for memdev in found["memdevs"]] == ["endpoint", "endpoint"]
    (region,) = found["regions"]
    assert (region["root"], region["driver"]) == ("decoder0.0", "cxl_region")
    assert region["decoders"] == ["decoder3.0", "decoder4.0"]
    of_region = [d for d in found["decoders"] if d["name"] in region["decoders"]]
    assert [(d["memdev"], d["dpa_bytes"], d["mode"]) for d in of_region] == [
        ("mem0", 256 << 20, "ram"),
        ("mem1", 256 << 20, "ram"),
    ]


def test_blocks_are_joined_where_they_are_alike(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    block = root / "sys/devices/system/memory/memory212"
    (block / "state").write_text("offline\n")
    (block / "valid_zones").write_text("Normal Movable\n")
    found = [(b["first"], b["last"], b["state"], b["zones"]) for b in document(root)["blocks"]]
    assert found == [
        (210, 211, "online", ["Movable"]),
        (212, 212, "offline", ["Normal", "Movable"]),
        (213, 213, "online", ["Movable"]),
    ]
    shown = listed(root).output
    assert "├─ blocks 212-212: 128 MiB offline, Normal or Movable" in shown


def test_memory_that_the_firmware_set_up_has_no_dax_device(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    (root / "sys/bus/dax/devices/dax0.0").unlink()
    assert "   └─ blocks 210-213: 512 MiB online, Movable" in listed(root).output


def test_persistent_memory_is_shown_as_such(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    (real(root, "region0") / "mode").write_text("pmem\n")
    (real(root, "mem0") / "pmem/size").write_text("0x10000000\n")
    shown = listed(root).output
    assert "region0: persistent memory, 512 MiB" in shown
    assert "mem0: 512 MiB ram, 256 MiB pmem" in shown


def test_a_region_that_is_not_set_up(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    (root / "sys/bus/dax/devices/dax0.0").unlink()
    region = real(root, "region0")
    for name, content in {
        "interleave_ways": "0",
        "interleave_granularity": "0",
        "size": "0x0",
        "resource": "0xffffffffffffffff",
        "commit": "0",
    }.items():
        (region / name).write_text(content + "\n")
    (region / "driver").unlink()
    shown = listed(root).output
    assert "region0: ram, 0 B, ways not set, not committed, no driver" in shown
    assert "over no device" in shown


def test_health(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    function = real(root, "mem0").parent
    for kind, total, count in (("correctable", "COR", 2), ("fatal", "FATAL", 0)):
        (function / f"aer_dev_{kind}").write_text(AER.format(total, count))
    (real(root, "mem0") / "driver").unlink()
    assert document(root)["memdevs"][0]["health"] == {
        "driver": None,
        "security": "disabled",
        "correctable_errors": 2,
        "nonfatal_errors": None,
        "fatal_errors": 0,
    }
    told = "health: no driver, security disabled, errors 2 correctable, 0 fatal"
    assert told in listed(root).output


def test_a_device_without_an_endpoint(tmp_path: Path) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    (root / "sys/bus/cxl/devices/endpoint2").unlink()
    (memdev,) = cxl.read_memdevs(root)
    assert (memdev.bridge, memdev.route) == (None, ())


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("sys/bus/cxl/devices/decoder0.0/target_list", "12,a"),
        ("sys/bus/cxl/devices/decoder0.0/target_list", ",".join(["1"] * 17)),
        ("sys/bus/cxl/devices/decoder2.0/dpa_size", "much"),
        ("sys/devices/system/memory/block_size_bytes", "0"),
        ("sys/devices/system/memory/block_size_bytes", "1" * 17),
        ("sys/devices/pci0000:0c/0000:0c:00.0/0000:0d:00.0/aer_dev_fatal", "none"),
    ],
)
def test_garbled_files(tmp_path: Path, path: str, content: str) -> None:
    root = trees.unpack("cxl-7.2", tmp_path)
    (root / path).write_text(content)
    with pytest.raises(UnexpectedContent, match=Path(path).name):
        read_fabric((), root)


@pytest.mark.parametrize("name", CXL_TREES)
def test_devices_that_go_away_while_they_are_read(tmp_path: Path, name: str) -> None:
    root = trees.unpack(name, tmp_path)
    for path in (root / "sys/bus/cxl/devices").iterdir():
        if path.name.startswith(("decoder", "region", "endpoint")):
            target = path.readlink()
            path.unlink()
            path.symlink_to(f"{target}-gone")
    assert listed(root).exit_code == 0
