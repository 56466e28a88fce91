# SPDX-License-Identifier: Apache-2.0
"""The errors that tierd raises above OSError. Each says what is wrong and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TierdError(Exception):
    """Something tierd cannot do, in words for the operator.

    Args:
        message: what is wrong, naming the thing.
        hint: the next step, or None where there is none to give.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UnsupportedKernel(TierdError):
    """The running kernel lacks something: the message says what, the hint how to get it."""


class Conflict(TierdError):
    """Somebody else holds what tierd needs: a kdamond, a lock, a socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong in a configuration file; `key` is empty where it is the file as a whole."""

    file: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


class ConfigError(TierdError):
    """A configuration that was refused whole, with every problem found in it."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class Busy(TierdError):
    """What was asked for could not be done in time."""


class NotFound(TierdError):
    """There is nothing of that name here."""


class NoRoom(TierdError):
    """No tier has room for what is to be there."""


class TierFailed(TierdError):
    """A tier did not do what it was asked for: it raised, was late, or did a part of it."""


class Damaged(TierdError):
    """What is stored is not what was once written."""


class Lost(Damaged):
    """Of what was to be loaded, `slots` are gone for good; the others were loaded."""

    def __init__(self, message: str, slots: NDArray[np.int64], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.slots = slots
