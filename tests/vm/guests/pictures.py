# SPDX-License-Identifier: Apache-2.0
"""Draws the screens that tests/vm/test_operator.py has kept, for the README."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from guests.guest import REPOSITORY

SCREENS = REPOSITORY / ".out" / "screens"
"""Where the test keeps them."""

PICTURES = REPOSITORY / "docs" / "pictures"


def draw(screen: Path, picture: Path) -> None:
    """Draws a terminal's content, with its escape sequences, as SVG."""
    lines = [line.rstrip() for line in screen.read_text(encoding="utf-8").rstrip().splitlines()]
    width = max(Text.from_ansi(line).cell_len for line in lines)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    console.save_svg(str(picture), title=f"tierctl {screen.stem}")


def main() -> None:
    screens = sorted(SCREENS.glob("*.ans"))
    if not screens:
        sys.exit(f"no screens in {SCREENS}: tests/vm/test_operator.py makes them")
    PICTURES.mkdir(exist_ok=True)
    for screen in screens:
        picture = PICTURES / f"{screen.stem}.svg"
        draw(screen, picture)
        click.echo(picture.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
