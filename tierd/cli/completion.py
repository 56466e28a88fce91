# SPDX-License-Identifier: Apache-2.0
"""`tierctl completion`: the completion of its words in a shell."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """Returns what one of SHELLS is to source."""
    complete = get_completion_class(shell)
    assert complete is not None, "click has these three"
    return complete(click.Command("tierctl"), {}, "tierctl", "_TIERCTL_COMPLETE").source()


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion for a shell. It is to be sourced there."""
    click.echo(script(shell))
