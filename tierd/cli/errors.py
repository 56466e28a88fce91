# SPDX-License-Identifier: Apache-2.0
"""How tierd and tierctl end: 0 done, 1 what could not be done, 2 a wrong command line."""

from collections.abc import Mapping
from importlib import import_module
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
    """A group whose commands may raise TierdError and OSError.

    Args:
        modules: where commands are that are imported as they are asked for: all together take
            longer than most of them run.
    """

    def __init__(self, *args: Any, modules: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = {} if modules is None else modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._modules})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._modules and cmd_name not in self.commands:
            found = vars(import_module(self._modules[cmd_name])).values()
            commands = (each for each in found if isinstance(each, click.Command))
            self.add_command(next(each for each in commands if each.name == cmd_name))
        return super().get_command(ctx, cmd_name)

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
