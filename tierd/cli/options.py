# SPDX-License-Identifier: Apache-2.0
"""Options that several commands of tierctl take."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import click

from tierd.api.sockets import DONOR
from tierd.config import DEFAULT_PATH

PID = click.IntRange(1, 1 << 22)
"""What a command takes as a process."""

DONORS_RUNTIME_DIR = Path(f"/run/{DONOR}")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Size(click.ParamType[int]):
    """A size in bytes, or with K, M, G or T behind it, in powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9]{1,12})([KMGT]?)", value)
        if not found:
            self.fail(f"{value!r} is no size such as 512M or 4G", param, ctx)
        return int(found[1]) * _UNITS[found[2]]


SIZE = Size()


class Addresses(click.ParamType[range]):
    """Addresses as /proc/PID/maps and tierctl explain spell them: START-END, in hexadecimal."""

    name = "addresses"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> range:
        if isinstance(value, range):
            return value
        found = re.fullmatch(r"(?:0x)?([0-9a-fA-F]{1,14})-(?:0x)?([0-9a-fA-F]{1,14})", value)
        part = range(int(found[1], 16), int(found[2], 16)) if found else range(0)
        if not part:
            self.fail(f"{value!r} is no range such as 7f10c0000000-7f10c0400000", param, ctx)
        return part


ADDRESSES = Addresses()

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


def runtime_dir_option(what_for: str) -> Option:
    """Adds --runtime-dir, of a donor, as `runtime_dir`."""
    return click.option(
        "--runtime-dir",
        type=click.Path(path_type=Path),
        default=DONORS_RUNTIME_DIR,
        show_default=True,
        help=f"{what_for} here.",
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
