# SPDX-License-Identifier: Apache-2.0
"""The file that a recording is written to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from tierd.errors import TierdError


@contextmanager
def new_file(path: Path) -> Iterator[FileIO]:
    """Makes a file for a recording, which only its owner may read.

    Raises:
        TierdError: it is there already, or cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise TierdError(f"{path} is there already", hint="choose another name") from None
    except OSError as error:
        raise TierdError(f"{path}: {error.strerror}") from None
    with FileIO(descriptor, "wb") as file:
        yield file
