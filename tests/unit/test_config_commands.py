# SPDX-License-Identifier: Apache-2.0
import json
import os
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from tierd import config
from tierd.cli.config import DIFFERS
from tierd.cli.control import main
from tierd.config.show import as_dict
from tierd.observe import status


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["config", *map(str, arguments)], prog_name="tierctl")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A configuration of two files, of a daemon that would publish its status beside them."""
    path = tmp_path / "tierd.toml"
    path.write_text(f"[daemon]\nruntime_dir = '{tmp_path}'\n[policy]\nmode = 'observe'\n")
    drop_in(path).parent.mkdir()
    drop_in(path).write_text("[policy]\npayback = 3\n")
    return path


def drop_in(path: Path) -> Path:
    return path.with_name("tierd.toml.d") / "a.toml"


def test_check_names_the_files_that_it_has_read(path: Path) -> None:
    result = run("check", "--config", path)
    assert (result.exit_code, result.output) == (0, f"{path}: ok\n{drop_in(path)}: ok\n")
    told = json.loads(run("check", "--json", "--config", path).output)
    assert told == {"files": [str(path), str(drop_in(path))], "problems": []}


def test_check_tells_all_that_is_wrong(path: Path) -> None:
    path.write_text("[policy]\nmod = 1\n")
    drop_in(path).write_text("[policy]\npayback = -1\n")
    result = run("check", "--config", path)
    assert result.exit_code == 1
    assert result.stderr == (
        f"tierctl: error: {path}:2: policy.mod: unknown key; did you mean mode?\n"
        f"tierctl: error: {drop_in(path)}:2: policy.payback: must be from 0 to 1000; it is -1\n"
    )
    as_json = run("check", "--json", "--config", path)
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["problems"][1] == {
        "file": str(drop_in(path)),
        "line": 2,
        "key": "policy.payback",
        "message": "must be from 0 to 1000; it is -1",
    }


def test_check_of_a_file_that_is_not_there(path: Path) -> None:
    path.unlink()
    result = run("check", "--config", path)
    assert result.exit_code == 1
    assert f"{path}: cannot be read: No such file or directory" in result.stderr


def test_show_is_a_configuration_itself(path: Path, tmp_path: Path) -> None:
    result = run("show", "--config", path)
    assert f"payback = 3.0  # {drop_in(path)}:2\n" in result.output
    (tmp_path / "again.toml").write_text(result.output)
    again = config.load(tmp_path / "again.toml")
    assert as_dict(again) == as_dict(config.load(path))
    assert json.loads(run("show", "--json", "--config", path).output) == as_dict(again)


def test_show_tells_what_a_named_policy_gives(path: Path) -> None:
    drop_in(path).write_text('[policy]\nname = "capacity"\npayback = 3\n')
    text = run("show", "--config", path).output
    assert 'long_s = 30.0  # policy "capacity"\n' in text
    assert f"payback = 3.0  # {drop_in(path)}:3\n" in text


def test_schema_is_that_of_what_is_shown(path: Path) -> None:
    schema = json.loads(run("schema").output)
    jsonschema.validate(json.loads(run("show", "--json", "--config", path).output), schema)


def publish(path: Path, **more: object) -> None:
    """What a daemon that runs by the files publishes."""
    status.publish(path.parent, {"pid": os.getpid(), "set": {}, **more})


def test_diff_tells_what_a_reload_would_change(path: Path) -> None:
    publish(path, config=as_dict(config.load(path)))
    result = run("diff", "--config", path)
    assert (result.exit_code, result.output) == (0, "the daemon has what the files say\n")
    drop_in(path).write_text("[policy]\npayback = 4\n[[target]]\ncommand = 'redis-server'\n")
    result = run("diff", "--config", path)
    assert (result.exit_code, result.output) == (
        DIFFERS,
        'policy.payback: 3.0 -> 4.0\ntarget: [] -> [{"command": "redis-server"}]\n',
    )
    told = json.loads(run("diff", "--json", "--config", path).output)
    assert told[0] == {"key": "policy.payback", "before": 3.0, "after": 4.0}


def test_diff_without_a_daemon_or_with_an_older_one(path: Path) -> None:
    result = run("diff", "--config", path)
    assert result.exit_code == 1
    assert "no tierd is running" in result.stderr
    publish(path)
    result = run("diff", "--config", path)
    assert result.exit_code == 1
    assert "hint: restart it" in result.stderr
