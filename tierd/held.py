# SPDX-License-Identifier: Apache-2.0
"""Settings of the kernel that parts of tierd hold, each until none of them wants it any more."""

import logging
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path

from tierd.journal import EntryId, Journal, Tunable
from tierd.kernel import text

log = logging.getLogger("tierd")


class Held:
    """What is held, and for whom; who wants the same setting wants the same value of it.

    Args:
        journal: has what was changed, to be put back.
        root: where /proc and /sys are.
    """

    def __init__(self, journal: Journal, root: Path = Path("/")) -> None:
        self.root = root
        self.at = cache(root.joinpath)
        """Where a setting is, from its path: some are looked at ten times a second."""
        self._journal = journal
        self._entries: dict[str, EntryId] = {}
        self._wanted: dict[str, Set[str]] = {}

    def hold(self, owner: str, values: Mapping[str, str]) -> bool:
        """Sets what somebody wants where it is otherwise; returns whether any of it was.

        Args:
            owner: who wants it until it lets go, and nothing more of what it wanted before.
            values: by path below the root, in the order in which they are set.

        Raises:
            OSError, TierdError: one cannot be set, or not be put back; the owner has let go of all.
        """
        self._wanted[owner] = values.keys()
        try:
            self._put_back_unwanted()
            written = [path for path, value in values.items() if self._set(path, value)]
        except BaseException:
            self.let_go(owner)
            raise
        return bool(written)

    def let_go(self, owner: str) -> None:
        """Puts back what nobody else wants, the latest first.

        Raises:
            OSError, TierdError: that fails; it is tried again when anybody lets go.
        """
        self._wanted.pop(owner, None)
        self._put_back_unwanted()

    def change(self, path: str) -> Tunable | None:
        """Returns how a setting was changed, None where it is not as it was set here."""
        entry = self._entries.get(path)
        change = None if entry is None else self._journal.changes.get(entry)
        if isinstance(change, Tunable) and text.read(self.at(path)) == change.after:
            return change
        return None

    def _set(self, path: str, value: str) -> bool:
        change = self.change(path)
        if change is not None and change.after == value:
            return False
        if change is not None and change.before != value:
            self._journal.write_over(self._entries[path], value)
            return True
        self._put_back(path)  # of an earlier time there may be nothing left to put back
        entry = self._journal.write(self.at(path), value)
        if entry is not None:
            self._entries[path] = entry
        return entry is not None

    def _put_back_unwanted(self) -> None:
        wanted = set[str]().union(*self._wanted.values())
        for path in reversed([path for path in self._entries if path not in wanted]):
            self._put_back(path)

    def _put_back(self, path: str) -> None:
        if path in self._entries:
            told = self._journal.revert(self._entries[path])
            del self._entries[path]
            if told is not None:
                log.info("undone: %s", told)
