# SPDX-License-Identifier: Apache-2.0
"""Options that several commands of tierctl take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import click

from tierd.config import DEFAULT_PATH

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


def json_option(document: str | None = None) -> Option:
    """Adds --json as `as_json`; `document` is where what it prints is described."""
    told = "" if document is None else f", as {document} tells it"
    return click.option("--json", "as_json", is_flag=True, help=f"Print JSON{told}.")
