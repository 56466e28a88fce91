# SPDX-License-Identifier: Apache-2.0
"""How tierd and tierctl end: 0 done, 1 what could not be done, 2 a wrong command line."""

from typing import IO, Any

import click

from tierd.errors import TierdError


class Failure(click.ClickException):
    """An error as a person reads it: each line with the command's name, then the next step."""

    exit_code = 1

    def __init__(self, command: str, error: TierdError | OSError) -> None:
        super().__init__(_describe(error))
        self._command = command
        self._hint = error.hint if isinstance(error, TierdError) else None

    def show(self, file: IO[Any] | None = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"{self._command}: error: {line}", file=file, err=file is None)
        if self._hint is not None:
            click.echo(f"{self._command}: hint: {self._hint}", file=file, err=file is None)


class Commands(click.Group):
    """A group whose commands may raise TierdError and OSError."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (TierdError, OSError) as error:
            raise Failure(ctx.find_root().info_name or "", error) from error


def _describe(error: TierdError | OSError) -> str:
    if isinstance(error, TierdError):
        return str(error)
    named = f"{error.filename}: " if error.filename is not None else ""
    return f"{named}{error.strerror or error}"
