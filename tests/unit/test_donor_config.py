# SPDX-License-Identifier: Apache-2.0
"""tierd-donor's options from a file."""

import re
from pathlib import Path
from typing import Any

import pytest
import trustme
from click.testing import CliRunner, Result
from sweeps.donors import make_keys

from tierd.cli.donor import main, run
from tierd.cli.option_file import options_of, read_options
from tierd.errors import ConfigError

TEMPLATE = Path(__file__).parents[2] / "systemd/donor.toml"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "donor.toml"


def problems(path: Path, content: str) -> list[str]:
    path.write_text(content)
    with pytest.raises(ConfigError) as raised:
        read_options(run, path)
    return [str(problem).removeprefix(str(path)) for problem in raised.value.problems]


def tierd_donor(*words: str) -> Result:
    return CliRunner().invoke(main, words, prog_name="tierd-donor")


def with_keys(folder: Path) -> str:
    keys = make_keys(folder, trustme.CA(), "host-a")
    return f'ca = "{keys.ca}"\ncert = "{keys.cert}"\nkey = "{keys.key}"\n'


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ('lend = "64G"', "lend_bytes", 64 << 30),
        ("lend = 4096", "lend_bytes", 4096),
        ("node = [0, 2]", "nodes", [0, 2]),
        ("node = []", "nodes", []),
        ("grace = 1.5", "grace_s", 1.5),
        ("grace = 600", "grace_s", 600.0),
        ('allow = ["host-d"]', "allow", ["host-d"]),
        ('metrics_listen = "[::1]:9465"', "metrics_listen", "[::1]:9465"),
    ],
)
def test_values_are_as_on_the_command_line(path: Path, line: str, name: str, value: Any) -> None:
    path.write_text(line)
    assert read_options(run, path) == {name: value}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('lend = "64Q"', "lend: '64Q' is no size such as 512M or 4G"),
        ("lend = -1", "lend: '-1' is no size such as 512M or 4G"),
        ("lend = true", "lend: must be text or a number"),
        ("lend = [1]", "lend: must be one value, and no list"),
        ("node = 1", "node: must be a list, in [ ]"),
        ("node = [-1]", "node: -1 is not in the range 0<=x<=1023."),
        ("grace = -1", "grace: -1.0 is not in the range x>=0."),
        ('listen = "host:x"', "listen: 'host:x' is no host:port, such as host-a:7430"),
        ('ca = "/nowhere"', "ca: File '/nowhere' does not exist."),
        ("graze = 1", "graze: unknown key; did you mean grace?"),
        ("[lend]", "lend: must be text or a number"),
        ('config = "x"', "config: unknown key; known are lend, "),
        ("lend", "is not TOML: "),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_key(path: Path, line: str, complaint: str) -> None:
    [told] = problems(path, f"\n{line}\n")
    assert told.startswith(f":2: {complaint}")


def test_all_that_is_wrong_is_told_at_once(path: Path) -> None:
    assert len(problems(path, "lend = true\nnode = 1\nfoo = 1\n")) == 3


def test_the_template_has_every_key_with_its_default(path: Path) -> None:
    lines = re.findall(r"^# (\w+ = .*)$", TEMPLATE.read_text(), re.MULTILINE)
    told = {line.partition(" = ")[0]: line for line in lines}
    options = options_of(run)
    assert told.keys() == options.keys()
    path.write_text("\n".join(line for key, line in told.items() if "pem" not in line))
    values = read_options(run, path)
    for key in ("reserve", "listen", "grace", "runtime_dir"):
        option = options[key]
        assert values[option.name or key] == option.type.convert(option.default, option, None)


def test_run_takes_what_it_is_not_told_from_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd.cli.donor.load_nixl", lambda: None)
    path.write_text(f'lend = "1024T"\nlisten = "127.0.0.1:0"\n{with_keys(path.parent)}')
    refused = tierd_donor("run", "--config", str(path), "--reserve", "7M")
    assert refused.exit_code == 1
    assert "1073741824 MiB to be lent, 7 MiB to be kept" in refused.output
    refused = tierd_donor("run", "--config", str(path), "--lend", "2048T")
    assert "2147483648 MiB to be lent, 1024 MiB to be kept" in refused.output


def test_run_without_a_file_that_is_named_says_so(path: Path) -> None:
    refused = tierd_donor("run", "--config", str(path))
    told = f"tierd-donor: error: {path}: cannot be read: No such file or directory\n"
    assert (refused.exit_code, refused.output) == (1, told)


def test_check_tells_what_is_missing(path: Path) -> None:
    path.write_text('listen = "127.0.0.1:0"\n')
    told = tierd_donor("check", "--config", str(path))
    assert (told.exit_code, told.output.splitlines()) == (
        1,
        [f"tierd-donor: error: {path}: {key} is missing" for key in ("lend", "ca", "cert", "key")],
    )


def test_check_tells_whether_keys_are_keys(path: Path) -> None:
    path.write_text(f'lend = "1G"\n{with_keys(path.parent)}')
    assert tierd_donor("check", "--config", str(path)).output == f"{path}: ok\n"
    (path.parent / "host-a.key").write_text("no key")
    told = tierd_donor("check", "--config", str(path))
    assert "docs/remote.md tells how to make them" in told.output
