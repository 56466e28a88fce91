# SPDX-License-Identifier: Apache-2.0
"""Several files of one configuration, and its shown, compared and exported forms."""

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tierd import config
from tierd.config import Config, Mode
from tierd.config.rules import TABLES
from tierd.config.schema import schema
from tierd.config.show import as_dict, as_toml
from tierd.errors import ConfigError

SHIPPED = Path(__file__).parents[2] / "systemd/tierd.toml"


def write(folder: Path, main: str, **drop_ins: str) -> Path:
    """Writes tierd.toml, and a10="..." as tierd.toml.d/a10.toml."""
    path = folder / "tierd.toml"
    path.write_text(main)
    if drop_ins:
        (folder / "tierd.toml.d").mkdir()
    for name, content in drop_ins.items():
        (folder / "tierd.toml.d" / f"{name}.toml").write_text(content)
    return path


def test_drop_ins_come_on_top_in_the_order_of_their_names(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[policy]\nmode = 'observe'\npayback = 3\n[[target]]\npid = 1",
        b20="[policy]\npayback = 5\n[[target]]\ncommand = 'b'",
        a10="[policy]\npayback = 4\n[damon]\ntake_over = true\n[[target]]\ncommand = 'a'",
    )
    read = config.load(path)
    assert (read.policy.mode, read.policy.placement.payback) == (Mode.OBSERVE, 5)
    assert read.damon.take_over
    assert [(t.pid, t.command) for t in read.targets] == [(1, None), (None, "a"), (None, "b")]


def test_what_is_no_drop_in_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "", a10="")
    for name in (".hidden.toml", "b.toml.dpkg-old", "README"):
        (tmp_path / "tierd.toml.d" / name).write_text("nonsense")
    assert config.load(path) == Config()
    assert [file.name for file in config.files(path)] == ["tierd.toml", "a10.toml"]


def test_problems_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[policy]\npaybck = 3\n\n[[tier]]\nname = 'a'\nkind = 'dram'\nnodes = [0]",
        a10="[policy]\npayback = -1\nshort_s = 20",
        b20="[policy]\npayback = 4\n[[tier]]\nname = 'a'\nkind = 'cxl'\nnodes = [0]",
        c30="[policy\n",
    )
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    folder = tmp_path / "tierd.toml.d"
    assert [str(problem) for problem in caught.value.problems] == [
        f"{folder}/c30.toml:1: is not TOML: Expected ']' at the end of a table declaration",
        f"{path}:2: policy.paybck: unknown key; did you mean payback?",
        f"{folder}/a10.toml:2: policy.payback: must be from 0 to 1000; it is -1",
        f"{folder}/b20.toml:1: policy.long_s: must be above short_s, which is 20",
        f"{folder}/b20.toml:4: tier[1].name: another tier is named a too",
        f"{folder}/b20.toml:6: tier[1].nodes: node 0 is already in tier a",
    ]


def test_tiers_are_counted_over_all_files(tmp_path: Path) -> None:
    def tiers(first: int) -> str:
        return "".join(
            f"[[tier]]\nname = 't{n}'\nkind = 'dram'\nnodes = [{n}]\n"
            for n in range(first, first + 5)
        )

    path = write(tmp_path, tiers(0), a10=tiers(5))
    with pytest.raises(ConfigError, match=r"a10.toml:13: tier\[4\]: at most 8 tiers"):
        config.load(path)


def test_folder_that_cannot_be_listed_or_holds_too_much(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    folder = tmp_path / "tierd.toml.d"
    folder.write_text("")
    with pytest.raises(ConfigError, match=r"tierd.toml.d: cannot be read: Not a directory"):
        config.load(path)
    folder.unlink()
    folder.mkdir()
    for number in range(101):
        (folder / f"{number}.toml").write_text("")
    with pytest.raises(ConfigError, match=r"tierd.toml.d: holds more than 100 drop-ins"):
        config.load(path)


def test_shown_as_toml_it_is_the_same_again(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[daemon]\ninterval_s = 2\n[[tier]]\nname = 'far'\nkind = 'cxl'\nnodes = [1, 2]",
        a10='[[target]]\ncgroup = "/it\'s.slice"',
    )
    loaded = config.load_with_places(config.files(path))
    shown = as_toml(loaded.config, loaded.places)
    again = config.parse(shown, "again")
    assert as_dict(again) == as_dict(loaded.config)
    assert f"interval_s = 2.0  # {path}:2\n" in shown
    assert 'mode = "place"  # default\n' in shown
    assert f"[[target]]  # {tmp_path}/tierd.toml.d/a10.toml:2\n" in shown


def validator() -> Any:
    checker = jsonschema.Draft202012Validator
    checker.check_schema(schema())
    return checker(schema())


def test_schema_takes_the_shipped_file_and_the_defaults() -> None:
    validator().validate(tomllib.loads(SHIPPED.read_text()))
    validator().validate(json.loads(json.dumps(as_dict(Config()))))


@pytest.mark.parametrize(
    "content",
    [
        "[demon]",
        "[daemon]\nintervall_s = 1",
        "[daemon]\ninterval_s = 0",
        "[daemon]\nstate_dir = 'here'",
        "[damon]\nmin_regions = 2.5",
        "[damon]\ntake_over = 'yes'",
        "[policy]\nmode = 'move'",
        "[[tier]]\nname = 'a'\nkind = 'dram'",
        "[[tier]]\nname = 'A b'\nkind = 'dram'\nnodes = [0]",
        "[[tier]]\nname = 'a'\nkind = 'dram'\nnodes = []",
        "[[target]]",
        "[[target]]\npid = 1\ncommand = 'a'",
    ],
)
def test_schema_refuses_what_the_check_refuses(content: str) -> None:
    with pytest.raises(ConfigError):
        config.parse(content, "f")
    assert not validator().is_valid(tomllib.loads(content))


def test_schema_knows_every_key_and_default() -> None:
    properties = schema()["properties"]
    told = {table: set(properties[table]["properties"]) for table in TABLES}
    assert told == {table: set(rules) for table, rules in TABLES.items()}
    assert properties["policy"]["properties"]["payback"] == {
        "type": "number",
        "minimum": 0,
        "maximum": 1000,
        "default": 2.0,
    }
