# SPDX-License-Identifier: Apache-2.0
"""What the documents say that a program can look up."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
import pytest

from tierd.cli import control, daemon
from tierd.config import PolicyConfig

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


def test_decisions_are_numbered_in_order() -> None:
    names = sorted(path.name for path in (REPOSITORY / "docs/decisions").iterdir())
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))


def every_command(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Yields the commands of a group and of the groups in it."""
    for name, command in group.commands.items():
        yield name, command
        if isinstance(command, click.Group):
            yield from every_command(command)


@pytest.mark.parametrize(
    ("page", "commands"), [("tierd.8", daemon.main), ("tierctl.1", control.main)]
)
def test_manual_pages_name_every_command_and_option(page: str, commands: click.Group) -> None:
    text = (REPOSITORY / "docs/man" / page).read_text().replace("\\-", "-")
    for name, command in every_command(commands):
        options = (p for p in command.params if isinstance(p, click.Option) and not p.hidden)
        wanted = {name, *(spelling for option in options for spelling in option.opts)}
        assert {w for w in wanted if not re.search(rf"(?<![\w-]){w}(?![\w-])", text)} == set()
