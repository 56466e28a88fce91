# SPDX-License-Identifier: Apache-2.0
"""A demo's figures as a file, for scripts."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def json_option() -> Callable[[Any], Any]:
    """Adds --json as `json_path`."""
    return click.option(
        "--json",
        "json_path",
        type=click.Path(path_type=Path, dir_okay=False, writable=True),
        help="Write the figures to this file too.",
    )


def write_figures(result: "DataclassInstance", path: Path | None) -> None:
    """Writes a result, where a path was given."""
    if path is not None:
        path.write_text(json.dumps(asdict(result), indent=2) + "\n")
