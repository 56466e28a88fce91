# SPDX-License-Identifier: Apache-2.0
"""The completion of tierctl's words in a shell.

Usage: python -m tierd.cli.completion SHELL
As `tierctl completion`, without all that tierctl has to load: for scripts/install.
"""

import sys

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """Returns what one of SHELLS is to source."""
    complete = get_completion_class(shell)
    assert complete is not None, "click has these three"
    return complete(click.Command("tierctl"), {}, "tierctl", "_TIERCTL_COMPLETE").source()


if __name__ == "__main__":
    click.echo(script(sys.argv[1]))
