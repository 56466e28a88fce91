# SPDX-License-Identifier: Apache-2.0
"""What the documents say that a program can look up."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tierd.api.view import View
from tierd.cli import control, daemon, donor
from tierd.config import PolicyConfig
from tierd.config.rules import ARRAYS, TABLES

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]


def test_policy_has_each_key_with_its_default() -> None:
    defaults = asdict(PolicyConfig())
    defaults |= defaults.pop("placement")
    text = (REPOSITORY / "docs/policy.md").read_text()
    told = re.findall(r"^\| `(\w+)` \| ([\w.]+) \|", text, re.MULTILINE)
    spelled = {key: f"{v:g}" if isinstance(v, float) else str(v) for key, v in defaults.items()}
    assert dict(told) == spelled


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


USES = REPOSITORY / "docs/uses.md"
EXAMPLES = re.findall(r"## ([^\n]+)\n\n```python\n(.*?)```", USES.read_text(), re.DOTALL)


def test_each_use_has_an_example() -> None:
    assert len(EXAMPLES) == USES.read_text().count("\n## ") == 5


@pytest.mark.parametrize(("use", "example"), EXAMPLES, ids=[use for use, _ in EXAMPLES])
def test_the_examples_of_uses_run(
    use: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(example, f"docs/uses.md, {use}", "exec"), {})
    assert capsys.readouterr().out


def test_the_readmes_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL
    )
    assert example.count("/var/tmp") == 1
    exec(compile(example.replace("/var/tmp", str(tmp_path)), "README.md", "exec"), {})
    assert "moved=" in capsys.readouterr().out


def test_decisions_are_numbered_in_order() -> None:
    names = sorted(path.name for path in (REPOSITORY / "docs/decisions").iterdir())
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))


def every_command(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Yields the commands of a group and of the groups in it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from every_command(command)


def test_the_manual_page_has_every_table_of_the_configuration() -> None:
    page = (REPOSITORY / "docs/man/tierd.8").read_text()
    told = set(re.findall(r"\.TP\n\.B (\[\S+)", page))
    assert told == {f"[{table}]" for table in TABLES} | {f"[[{table}]]" for table in ARRAYS}


@pytest.mark.parametrize(
    ("page", "commands"),
    [("tierd.8", daemon.main), ("tierctl.1", control.main), ("tierd-donor.8", donor.main)],
)
def test_manual_pages_name_every_command_and_option(page: str, commands: click.Group) -> None:
    text = (REPOSITORY / "docs/man" / page).read_text().replace("\\-", "-")
    for name, command in every_command(commands):
        options = (p for p in command.params if isinstance(p, click.Option) and not p.hidden)
        wanted = {name, *(spelling for option in options for spelling in option.opts)}
        assert {w for w in wanted if not re.search(rf"(?<![\w-]){w}(?![\w-])", text)} == set()


def test_the_dashboard_asks_for_metrics_that_are_told(view: View) -> None:
    dashboard = json.loads((REPOSITORY / "docs/grafana.json").read_text())
    told = {line.partition("{")[0].partition(" ")[0] for line in view.metrics().splitlines()}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = set(re.findall(r"\b((?:tierd|process)_\w+)", " ".join(asked)))
    assert len(names) > 8
    assert names <= told | {"tierd_kept_bytes"}, "kept has nothing to tell here"


def test_the_dashboard_is_one_to_grafanas_own_models() -> None:
    """A key that they don't know is lost by them. No Grafana runs here."""
    plugins.register_default_plugins()
    written = json.loads((REPOSITORY / "docs/grafana.json").read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert list(lost(written, read)) == []


def lost(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Yields where a document is not as before, but for what has been added."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from lost(*pair, f"{place}[{number}]")
    elif before != after:
        yield place


def test_the_dashboard_has_a_place_for_each_panel() -> None:
    panels = json.loads((REPOSITORY / "docs/grafana.json").read_text())["panels"]
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
