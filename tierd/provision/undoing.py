# SPDX-License-Identifier: Apache-2.0
"""What fails is taken back, and the error tells what was undone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tierd.errors import TierdError


@contextmanager
def undone_where_it_fails(undo: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Takes back what the block has done, where it fails or is interrupted.

    Args:
        undo: does so, and returns what it did, for people.

    Raises:
        TierdError: what the block raised, with what was undone.
    """
    try:
        yield
    except BaseException as error:
        told = undo()
        if isinstance(error, TierdError):
            error.args = ("\n".join([str(error), *told]),)
            raise
        if isinstance(error, (OSError, KeyboardInterrupt)):
            raise TierdError("\n".join([str(error) or "interrupted", *told])) from error
        raise
