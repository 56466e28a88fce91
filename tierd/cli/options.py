# SPDX-License-Identifier: Apache-2.0
"""Options that several commands of tierctl take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import click

from tierd.config import DEFAULT_PATH

PID = click.IntRange(1, 1 << 22)
"""What a command takes as a process."""

Option: TypeAlias = Callable[[Any], Any]
"""A decorator of a command."""


def config_option(what_for: str) -> Option:
    """Adds --config, a file in place of the default one, as `config_path`."""
    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        help=f"{what_for}; {DEFAULT_PATH} where it exists.",
    )


def interval_option() -> Option:
    """Adds --interval as `interval_s`."""
    return click.option(
        "--interval",
        "interval_s",
        type=click.FloatRange(0.1, 3600),
        default=1.0,
        show_default=True,
        help="Look so often, in seconds.",
    )


def json_option(document: str | None = None) -> Option:
    """Adds --json as `as_json`; `document` is where what it prints is described."""
    told = "" if document is None else f", as {document} tells it"
    return click.option("--json", "as_json", is_flag=True, help=f"Print JSON{told}.")
