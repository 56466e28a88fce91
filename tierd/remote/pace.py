# SPDX-License-Identifier: Apache-2.0
"""How long to rest between copies, so that they keep to so many bytes a second."""

SAVED_S = 0.1
"""What was not copied in time is made up for so far."""


class Pace:
    """A budget of `bytes_per_s`, from a moment on. Times are of one clock, in seconds."""

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._paid_s = now_s
        """Up to when the budget is used."""

    def rest_s(self, size_bytes: int, now_s: float) -> float:
        """Returns for how long a copy of that size has to wait."""
        cost_s = size_bytes / self._bytes_per_s
        self._paid_s = max(self._paid_s, now_s - max(cost_s, SAVED_S))
        return max(0.0, self._paid_s + cost_s - now_s)

    def copied(self, size_bytes: int) -> None:
        """Takes note of a copy."""
        self._paid_s += size_bytes / self._bytes_per_s
