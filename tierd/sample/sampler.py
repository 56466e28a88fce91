# SPDX-License-Identifier: Apache-2.0
"""What samples accesses, as the daemon sees it: DAMON, or records that are played again."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.bulk import Accesses
from tierd.model import Pid
from tierd.sample.hardware import Sampling
from tierd.sample.tuning import Tuning


class Sampler(Protocol):
    """Watches processes and tells of their accesses."""

    @property
    def way(self) -> str:
        """How the accesses get here, in a word for status."""
        ...

    @property
    def losses(self) -> int:
        """Records that were lost on the way, ever."""
        ...

    @property
    def tuning(self) -> Mapping[Pid, Tuning]:
        """How each target is watched now."""
        ...

    @property
    def sampling(self) -> Sampling | None:
        """How hardware samples accesses; None where it does not."""
        ...

    def watch(self, pid: Pid) -> None:
        """Begins to watch a process; one that is watched already goes on.

        Raises:
            ProcessLookupError: there is no such process (any more).
            TierdError: it cannot be watched.
        """
        ...

    def unwatch(self, pid: Pid) -> None:
        """Ends watching a process; one that isn't watched is none of our business."""
        ...

    def poll(self) -> list[Accesses]:
        """Returns the complete snapshots since the last poll, oldest first, of all targets."""
        ...

    @property
    def loads(self) -> NDArray[np.void]:
        """Loads that memory served (dtype LOAD), of all processes, as the last poll() found them.

        Empty where nothing tells what loads take.
        """
        ...

    @property
    def zoomed_pages(self) -> int:
        """Pages that were looked at one by one, ever."""
        ...

    is_calm: bool
    """Whether nothing happens, so that it may look more roughly; whoever polls tells that."""

    @property
    def can_look(self) -> bool:
        """Whether zoom() would begin something now."""
        ...

    @property
    def can_zoom(self) -> bool:
        """Whether it would, and is to wherever regions are in doubt."""
        ...

    def zoom(self, pid: Pid, start: int, end: int, *, per_page_s: float) -> bool:
        """Begins to look at single pages, of a range as far as the budget allows.

        Returns whether it has begun.

        What is seen comes from poll(), seconds later, as a zoomed snapshot; or never.

        Args:
            pid: a process that is watched.
            start: an address, likewise `end`.
            end: where the range ends.
            per_page_s: the pages' mean rate of accesses, as far as known.
        """
        ...

    def gone(self) -> list[Pid]:
        """Returns, and lets go of, the targets that have exited or cannot be watched any more."""
        ...

    def filenos(self) -> Sequence[int]:
        """Returns descriptors that poll readable when poll() or gone() has something to tell.

        They change with watch(), unwatch() and gone().
        """
        ...

    def close(self) -> None:
        """Ends watching, and leaves the machine as it was."""
        ...
