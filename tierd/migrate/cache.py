# SPDX-License-Identifier: Apache-2.0
"""Page cache makes way for memory that lacks room: the kernel is asked to demote it.

What of it is used only the kernel knows. What it has as inactive was not used again since it came
there, or was active; of that a part is asked for, so small that a page has been there for `long_s`
before it goes. Those that are used meanwhile come back to the active ones.
"""

import errno
import logging
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from typing import Self

from tierd.errors import TierdError, UnsupportedKernel
from tierd.held import Held
from tierd.kernel import numa_balancing, page_cache, text
from tierd.kernel.nodes import read_inactive_cache
from tierd.kernel.tunable import Files, KernelFiles
from tierd.kernel.vmstat import read_vmstat
from tierd.model import PAGE_BYTES, NodeId, Policy, Tier, Topology

log = logging.getLogger("tierd")

OWNER = "page cache"
LEAVE_OUT = "leave demote_cache out of [migrate]"
SERVICE = (
    "put [Service] and ReadWritePaths=/sys/devices/system/node /proc/sys/vm/min_unmapped_ratio "
    "into: systemctl edit tierd, and start it again"
)

LEAST_BYTES = 32 * PAGE_BYTES
"""What the kernel reclaims at a time (SWAP_CLUSTER_MAX)."""

ENOUGH = 0.5
"""Of what was asked for; with less the kernel has little that may go."""

PASSING = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})
"""Answers of a kernel that found less, or is asked by somebody else."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the kernel was asked for, and the pages that it will have demoted."""

    size_bytes: int
    pages: Future[int]


class Cache:
    """A context in which page cache may be asked to make way, by a thread of its own.

    Args:
        held: has the kernel's setting, to be put back.
        files: how the kernel is asked.
    """

    def __init__(self, held: Held, files: Files | None = None) -> None:
        self.moved_pages = 0
        self._held, self._root = held, held.root
        self._files: Files = files or KernelFiles()
        self._is_held = False
        self._asked: _Asked | None = None
        self._refusals, self._rests_until_s = 0, float("-inf")
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tierd-cache")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.shutdown()

    def wait(self) -> None:
        """Waits until what was asked for is done."""
        if self._asked is not None:
            futures.wait([self._asked.pages])

    def require(self, topology: Topology) -> None:
        """Makes sure that page cache can make way.

        Raises:
            UnsupportedKernel: it cannot.
            TierdError: the kernel may not be asked.
        """
        leavable = self._leavable(topology)
        if not leavable:
            raise UnsupportedKernel(
                "the kernel cannot be asked to demote page cache: that takes Linux 6.17, and "
                "memory that it has as a lower tier",
                hint=LEAVE_OUT,
            )
        for node in sorted(leavable):
            if not page_cache.may_demote(node, self._root):
                raise TierdError(
                    f"page cache of node {node} cannot be demoted: its file `reclaim` is read-only",
                    hint=f"{SERVICE}; or {LEAVE_OUT}",
                )

    def hold(self, wanted: bool) -> None:
        """Has the kernel demote what it is asked for, and not drop it; or all as it was.

        What it was asked for is done before, or it would drop the rest.

        Raises:
            OSError, TierdError: that cannot be set, or not be put back.
        """
        if not wanted:
            self.wait()
            self._held.let_go(OWNER)
        elif self._held.hold(OWNER, self._settings()):
            log.info("the kernel demotes page cache when asked to, until tierd ends")
        self._is_held = wanted

    def _settings(self) -> dict[str, str]:
        """Returns what has the kernel demote, however little there is where that may be set."""
        settings = {numa_balancing.DEMOTES: numa_balancing.YES}
        if page_cache.may_demote_all(self._root):
            settings[page_cache.LEAST] = "0"
        return settings

    def make_room(
        self,
        topology: Topology,
        lacks: Sequence[int],
        policy: Policy,
        *,
        interval_s: float,
        most_bytes: int,
        now_s: float,
    ) -> None:
        """Asks for what there is a use for, once what was asked for before is done.

        Args:
            topology: the tiers.
            lacks: how many bytes each of them but the slowest has too few.
            policy: page cache goes that was not used for its `long_s`.
            interval_s: how often this is called.
            most_bytes: no more is asked for.
            now_s: CLOCK_MONOTONIC.
        """
        self._take_in(policy, now_s)
        if not self._is_held or self._asked is not None or now_s < self._rests_until_s:
            return
        part = min(interval_s / policy.long_s, 1.0)
        for tier, lacking in zip(topology.tiers, lacks, strict=False):
            if min(lacking, most_bytes) < LEAST_BYTES:
                continue
            node, inactive_bytes = self._most_inactive(topology, tier)
            size_bytes = int(min(lacking, most_bytes, part * inactive_bytes))
            if size_bytes >= LEAST_BYTES and self._demotes():
                self._asked = _Asked(size_bytes, self._worker.submit(self._ask, node, size_bytes))
                return

    def _most_inactive(self, topology: Topology, tier: Tier) -> tuple[NodeId, int]:
        """Returns the node of a tier with the most that may go, and how many bytes that is."""
        nodes = self._leavable(topology) & {*tier.nodes}
        sizes = ((node, read_inactive_cache(node, self._root)) for node in nodes)
        return max(sizes, key=itemgetter(1), default=(tier.nodes[0], 0))

    def _leavable(self, topology: Topology) -> frozenset[NodeId]:
        """Returns the nodes whose page cache the kernel would demote, and not drop."""
        upper = {node for tier in topology.tiers[:-1] for node in tier.nodes}
        return frozenset(
            node.id
            for node in topology.nodes
            if node.id in upper
            and page_cache.has_lower(node, topology.nodes)
            and page_cache.can_demote(node.id, self._root)
        )

    def _ask(self, node: NodeId, size_bytes: int) -> int:
        """Returns how many pages were demoted."""
        before = self._demoted_pages(node)
        try:
            page_cache.demote(node, size_bytes, self._root, self._files)
        except OSError as error:
            level = logging.DEBUG if error.errno in PASSING else logging.WARNING
            log.log(level, "page cache of node %d cannot make way: %s", node, error)
        return max(self._demoted_pages(node) - before, 0)

    def _demoted_pages(self, node: NodeId) -> int:
        """Returns how many were ever demoted because somebody asked for it."""
        return read_vmstat(self._root, node).pgdemote_proactive or 0

    def _take_in(self, policy: Policy, now_s: float) -> None:
        """Counts what was demoted; where that was little, some time passes until the next try."""
        asked = self._asked
        if asked is None or not asked.pages.done():
            return
        self._asked, pages = None, asked.pages.result()
        self.moved_pages += pages
        if pages * PAGE_BYTES >= ENOUGH * asked.size_bytes:
            self._refusals = 0
            return
        rest_s = min(policy.retry_s * 2.0**self._refusals, policy.retry_most_s)
        self._refusals, self._rests_until_s = min(self._refusals + 1, 32), now_s + rest_s

    def _demotes(self) -> bool:
        return text.read(self._root / numa_balancing.DEMOTES) == numa_balancing.YES
