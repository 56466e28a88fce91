# SPDX-License-Identifier: Apache-2.0
"""Pictures by matplotlib, which only the extra `plot` brings."""

from pathlib import Path
from typing import TYPE_CHECKING

from tierd.errors import TierdError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure() -> "tuple[Figure, Axes]":
    """Returns an empty picture.

    Raises:
        TierdError: matplotlib isn't there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TierdError(
            "a picture needs matplotlib", hint="pip install 'tierd[plot]' where tierctl runs"
        ) from None
    figure = Figure(figsize=(9, 5), layout="constrained")
    return figure, figure.add_subplot()


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes a picture, of the kind that the file's name ends in.

    Raises:
        TierdError: matplotlib doesn't know this kind.
        OSError: it cannot be written.
    """
    try:
        figure.savefig(path)
    except ValueError as error:
        raise TierdError(f"{path}: {error}") from None
