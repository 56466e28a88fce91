# SPDX-License-Identifier: Apache-2.0
"""Where the shim's negative errnos become OSError."""

import os


def check(result: int, syscall: str) -> int:
    """Returns a result of the shim that is not negative.

    Raises:
        OSError: for -errno, in the subclass that Python has for it (ProcessLookupError,
            PermissionError), naming the system call.
    """
    if result < 0:
        raise OSError(-result, f"{syscall}: {os.strerror(-result)}")
    return result
