# SPDX-License-Identifier: Apache-2.0
"""When so many bytes may go, of so many a second."""


class Bucket:
    """What may be copied: `rate` bytes a second, and `burst` bytes at once after a rest.

    What is larger than the burst passes when the bucket is full, and is owed. So in any time no
    more passes than its bytes at that rate, and a burst or the largest of what passed. The clock is
    the caller's, in seconds, and does not go back.
    """

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self.rate, self.burst = rate, burst
        self._level, self._at_s = burst, now_s

    def due_s(self, size_bytes: int) -> float:
        """Returns when so much may pass, unless something else does before."""
        missing = min(size_bytes, self.burst) - self._level
        return self._at_s + max(missing, 0.0) / self.rate

    def take(self, size_bytes: float, now_s: float) -> None:
        """Has so much pass, which is due."""
        self._fill(now_s)
        self._level -= size_bytes

    def change(self, rate: float, burst: float, now_s: float) -> None:
        """Goes on at another rate with what there is, or is owed."""
        self._fill(now_s)
        self.rate, self.burst = rate, burst
        self._level = min(self._level, burst)

    def _fill(self, now_s: float) -> None:
        self._level = min(self._level + (now_s - self._at_s) * self.rate, self.burst)
        self._at_s = now_s
