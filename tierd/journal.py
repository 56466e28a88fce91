# SPDX-License-Identifier: Apache-2.0
"""The record of everything that was changed on the machine, written before each change.

`journal.jsonl` in the state directory, one line a change, synced to disk before the change is
made. So whatever a crash leaves behind is known to the next start:

    {"boot": "6b2c...", "id": 1, "kind": "slots", "before": 0, "after": 32}
    {"boot": "6b2c...", "id": 2, "kind": "kdamond", "slot": 0, "mark_us": 1041337, "target": 388}
    {"boot": "6b2c...", "id": 2, "kind": "kdamond", "slot": 0, "mark_us": 1041337, "target": 388,
     "pid": 412}
    {"boot": "6b2c...", "id": 2, "kind": "undone"}

The last line of an id holds. Lines of an earlier boot mean nothing any more: sysfs was new since.
Undoing looks at the machine first and takes back only what is still as we left it, so it may be
cut short at any point and run again.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NewType, Self, get_origin, get_type_hints

from tierd.errors import Conflict, TierdError
from tierd.kernel import tunable
from tierd.kernel.blocks import AUTO_ONLINE
from tierd.kernel.cxl_regions import Regions
from tierd.kernel.damon import Admin, Slot, SlotIndex
from tierd.kernel.tunable import Files, KernelFiles

EntryId = NewType("EntryId", int)

COMPACT_LINES = 512
"""A journal with more lines than this beside its live entries is rewritten."""

MOST_BYTES = 16 << 20
"""A hundred times what a journal comes to: a larger file is something else."""

TOLD_LINES = 8
"""So many lines that cannot be read are told one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """A file that was given another value, each in the form in which the kernel shows it.

    Where one of ours was written over, `replaced` is that: a crash may have come before `after`.
    """

    path: str
    before: str
    after: str
    replaced: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """DAMON's nr_kdamonds, which nobody used when it was changed."""

    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kdamond:
    """An empty kdamond slot that was set up, with its kdamond's pid once it runs."""

    slot: int
    mark_us: int
    target: int
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A CXL region that is being made, amended before each write: `doing` is the next one.

    `folder` is its folder's inode in sysfs once it is there, which the kernel never uses again. Of
    the endpoint decoders so many, `reserved`, may have `share_bytes` of their devices by then.
    """

    name: str
    root: str
    decoders: tuple[str, ...]
    share_bytes: int
    policy: str
    doing: str
    folder: int | None = None
    reserved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionDrain:
    """A CXL region that is being taken out of use, amended before each step: `doing` is the next.

    `kmem` are its dax devices that kmem had, and `online` its blocks that were online, each as
    NUMBER=POLICY, as auto_online_blocks spells how it was. Until it `ends` these come back; from
    then on the region has lost its driver, and is taken apart. `node` is what the daemon drains.
    """

    name: str
    root: str
    folder: int
    decoders: tuple[str, ...]
    share_bytes: int
    kmem: tuple[str, ...]
    online: tuple[str, ...]
    doing: str
    node: int | None = None
    ends: bool = False

    @property
    def policies(self) -> Mapping[int, str]:
        """How each block was online, by its number."""
        pairs = (block.partition("=") for block in self.online)
        return {int(number): policy for number, _, policy in pairs}


Change = Tunable | Slots | Kdamond | Region | RegionDrain

_KINDS: Mapping[str, type[Change]] = {
    "tunable": Tunable,
    "slots": Slots,
    "kdamond": Kdamond,
    "region": Region,
    "drain": RegionDrain,
}


class Journal:
    """The journal of one state directory, locked against a second tierd while it is open.

    Args:
        state_dir: made where it is missing.
        root: where `/proc` and `/sys` hang, `/` outside of tests.
        files: how tunables are reached.

    Raises:
        Conflict: another process has it open.
        TierdError: the directory cannot be written, or the file not read.
    """

    def __init__(
        self, state_dir: Path, *, root: Path = Path("/"), files: Files | None = None
    ) -> None:
        self._files: Files = files if files is not None else KernelFiles()
        self._admin = Admin(root, self._files)
        self._regions = Regions(root, self._files)
        self._auto_online = root / AUTO_ONLINE
        self._boot = tunable.boot_id(root)
        self._dir_fd = _open_locked(state_dir)
        self._path = state_dir / "journal.jsonl"
        self._live: dict[EntryId, Change] = {}
        self._unread: list[str] = []
        self._lines = 0
        try:
            self._fd = self._open()
            self._load()
        except BaseException:
            os.close(self._dir_fd)
            raise
        self._next = max(self._live, default=0) + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file and its lock; undoes nothing."""
        os.close(self._fd)
        os.close(self._dir_fd)

    @property
    def changes(self) -> Mapping[EntryId, Change]:
        """What is changed on the machine now, oldest first."""
        return dict(self._live)

    def write(self, path: Path, value: str) -> EntryId | None:
        """Records a file's value, then writes another; None when it holds that already.

        Args:
            path: a file that holds one value.
            value: in the form in which the kernel shows it, or undoing would not know it again.
        """
        before = self._files.read(path)
        if before == value:
            return None
        entry = self.record(Tunable(path=str(path), before=before, after=value))
        try:
            self._files.write(path, value)
        except OSError:
            self._forget(entry)
            raise
        return entry

    def write_over(self, entry: EntryId, value: str) -> None:
        """Writes another value over one of ours, in one step; undoing goes back before both.

        Raises:
            TierdError: it could not be recorded, so it was not written.
            OSError: the file refused it, and may hold either; undoing takes back both.
        """
        change = self._live[entry]
        assert isinstance(change, Tunable)
        self.amend(entry, replace(change, after=value, replaced=change.after))
        self._files.write(Path(change.path), value)

    def record(self, change: Change) -> EntryId:
        """Records a change that the caller makes next.

        Raises:
            TierdError: it could not be recorded, so the change must not be made.
        """
        entry = EntryId(self._next)
        self._append(entry, change)
        self._next += 1
        self._live[entry] = change
        return entry

    def amend(self, entry: EntryId, change: Change) -> None:
        """Records what became known of a change since."""
        self._append(entry, change)
        self._live[entry] = change

    def keep(self, entry: EntryId) -> None:
        """Has a change stay as it is: it is not to be taken back any more."""
        self._forget(entry)

    def revert(self, entry: EntryId) -> str | None:
        """Takes one change back; returns what was done or left, None when there was nothing to do.

        Raises:
            OSError, TierdError: it could not be taken back; it stays recorded.
        """
        if entry not in self._live:
            return None
        told = self._take_back(self._live[entry])
        self._forget(entry)
        return told

    def undo(self, *, but: Collection[EntryId] = ()) -> list[str]:
        """Takes back every change, the latest first; returns what it did, for the log.

        Those of `but` are left.

        What cannot be taken back now is told and stays recorded, for the next start.
        """
        told, self._unread = _shortened(self._unread), []
        for entry in sorted(self._live.keys() - set(but), reverse=True):
            try:
                line = self.revert(entry)
            except (OSError, TierdError, ValueError) as error:
                line = f"could not undo {self._live[entry]}: {error}; recorded for the next start"
            if line is not None:
                told.append(line)
        return told

    def _take_back(self, change: Change) -> str | None:
        match change:
            case Tunable():
                return self._revert_tunable(change)
            case Slots():
                return self._revert_slots(change)
            case Kdamond():
                return self._revert_kdamond(change)
            case Region():
                return self._revert_region(change)
            case RegionDrain() if change.ends:
                return self._end_drain(change)
            case RegionDrain():
                return self._revert_drain(change)

    def _revert_tunable(self, change: Tunable) -> str | None:
        path = Path(change.path)
        try:
            now = self._files.read(path)
        except FileNotFoundError:
            return f"{path} is gone: nothing to restore"
        if now == change.before:
            return None
        if now not in (change.after, change.replaced):
            return f"{path} holds {now!r}, not our {change.after!r}: left as it is"
        self._files.write(path, change.before)
        return f"{path}: {now} back to {change.before}"

    def _revert_slots(self, change: Slots) -> str | None:
        now = self._admin.count()
        if now == change.before:
            return None
        if now != change.after:
            return f"nr_kdamonds is {now}, not our {change.after}: left as it is"
        users = [str(slot) for slot in self._admin.slots() if not slot.is_free]
        if users:
            return f"nr_kdamonds left at {now}, which would wipe {'; '.join(users)}"
        self._admin.resize(change.before)
        return f"nr_kdamonds: {change.after} back to {change.before}"

    def _revert_kdamond(self, change: Kdamond) -> str | None:
        slot = self._admin.slot(SlotIndex(change.slot))
        if slot is None or slot.is_free:
            return None
        if not _is_ours(slot, change):
            return f"{slot} is not the one that was started for {change.target}: left as it is"
        self._admin.release(slot.index)
        return f"kdamond {change.slot} of process {change.target} stopped, its slot emptied"

    def _revert_region(self, change: Region) -> str | None:
        regions, name = self._regions, change.name
        folder = regions.folder(name)
        if folder is not None and not self._is_our_region(change, folder):
            return f"{name} is not the one that was being made: left as it is"
        if folder is not None and regions.is_whole(name, change.policy):
            return f"{name} was made whole, though not recorded as that: it stays"
        if folder is not None:
            regions.unplug(name)
        reserved = change.decoders[: change.reserved]
        freed = [regions.release(decoder, change.share_bytes) for decoder in reversed(reserved)]
        if folder is not None:
            regions.delete(name, change.root)
        elif not any(freed):
            return None
        return f"{name}, whose making was cut short at {change.doing}, was taken apart"

    def _end_drain(self, change: RegionDrain) -> str | None:
        """Takes a region apart to the end; one that has its folder no more is gone."""
        regions, name = self._regions, change.name
        if regions.folder(name) != change.folder:
            return None
        regions.unplug(name, is_settled=bool(change.kmem))
        for decoder in reversed(change.decoders):
            regions.release(decoder, change.share_bytes)
        regions.delete(name, change.root)
        return f"{name}, which was being drained, was taken apart to the end"

    def _revert_drain(self, change: RegionDrain) -> str | None:
        regions, name, online = self._regions, change.name, change.policies
        if regions.folder(name) != change.folder:
            return f"{name} is not the one that was being drained: left as it is"
        if regions.is_plugged(name, change.kmem, online):
            return None
        policy = self.write(self._auto_online, "offline")
        try:
            regions.plug(name, change.kmem, online)
        finally:
            if policy is not None:
                self.revert(policy)
        return f"{name}, whose drain was cut short at {change.doing}, is in use again"

    def _is_our_region(self, change: Region, folder: int) -> bool:
        """Tells a region of ours from one that somebody else has made under its name.

        A crash may have come between making it and recording its folder, where nothing is lost by
        deleting it: nothing has been written to it by then.
        """
        if change.folder is None:
            return self._regions.is_empty(change.name)
        return folder == change.folder

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            return os.open(self._path, flags, 0o600)
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def _load(self) -> None:
        """Reads the live entries. The last line may be torn: its change was never made then."""
        text = _read(self._path)
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            self._load_line(number, line)
            self._lines += 1
        if len(whole) < len(text):
            os.ftruncate(self._fd, len(whole))
        self._compact(most=0)

    def _load_line(self, number: int, line: bytes) -> None:
        try:
            fields = json.loads(line)
            boot, entry = fields.pop("boot"), EntryId(int(fields.pop("id")))
            kind = fields.pop("kind")
            change = None if kind == "undone" else _parse(_KINDS[kind], fields)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            self._unread.append(f"{self._path}:{number} cannot be read ({error!r}): passed over")
            return
        if boot != self._boot:
            return
        if change is None:
            self._live.pop(entry, None)
        else:
            self._live[entry] = change

    def _append(self, entry: EntryId, change: Change | None) -> None:
        self._compact(most=COMPACT_LINES)
        size = os.fstat(self._fd).st_size
        try:
            _write_synced(self._fd, self._line(entry, change))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise _unwritable(self._path, error) from error
        self._lines += 1

    def _line(self, entry: EntryId, change: Change | None) -> bytes:
        fields: dict[str, object] = {"boot": self._boot, "id": entry}
        if change is None:
            fields["kind"] = "undone"
        else:
            kind = next(name for name, known in _KINDS.items() if isinstance(change, known))
            fields |= {"kind": kind} | asdict(change)
        return json.dumps(fields).encode() + b"\n"

    def _forget(self, entry: EntryId) -> None:
        """Marks a change as taken back.

        On a full disk the mark is lost, which costs a look at the machine at the next start. With
        the last change even that is spared: to empty the file takes no room.
        """
        del self._live[entry]
        try:
            self._append(entry, None)
        except TierdError:
            if not self._live:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)

    def _compact(self, *, most: int) -> None:
        """Leaves the live entries alone in the file when it has so many lines beside them.

        On a full disk the file stays as it is, which must not keep a crash from being undone.
        """
        if self._lines - len(self._live) > most:
            with contextlib.suppress(OSError):
                self._rewrite()

    def _rewrite(self) -> None:
        """Replaces the file in one step; the old one stays on failure."""
        fresh = self._path.with_suffix(".new")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(fresh, flags, 0o600)
        try:
            _write_synced(fd, b"".join(self._line(*item) for item in self._live.items()))
            fresh.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._lines = fd, len(self._live)
        os.fsync(self._dir_fd)


def _open_locked(state_dir: Path) -> int:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unwritable(state_dir, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Conflict(
            f"another tierd is running on {state_dir}",
            hint="stop it first: systemctl stop tierd",
        ) from error
    return fd


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise _unusable(path, error.strerror) from error
    if len(text) > MOST_BYTES:
        raise _unusable(path, f"it has more than {MOST_BYTES >> 20} MiB, which no journal comes to")
    return text


def _write_synced(fd: int, data: bytes) -> None:
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(fd)


def _unwritable(path: Path, error: OSError) -> TierdError:
    return TierdError(
        f"{path}: {error.strerror}: tierd changes nothing that it cannot record",
        hint="make the state directory writable and see that its file system has room",
    )


def _unusable(path: Path, why: str | None) -> TierdError:
    return TierdError(
        f"{path}: {why}: what an earlier tierd has changed on this machine cannot be known",
        hint="see what is in the way; with the file moved aside tierd starts, and what it has "
        "recorded is no more after a reboot",
    )


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - TOLD_LINES
    return lines if more <= 0 else [*lines[:TOLD_LINES], f"and so are {more} other lines"]


def _parse(kind: type[Change], fields: Mapping[str, Any]) -> Change:
    """Makes a change of a line's fields; raises TypeError where they don't fit."""
    hints = get_type_hints(kind)
    return kind(
        **{name: _value(name, value, hints.get(name, ())) for name, value in fields.items()}
    )


def _value(name: str, value: Any, hint: Any) -> Any:
    if hint == tuple[str, ...] and isinstance(value, list):
        if all(isinstance(word, str) for word in value):
            return tuple(value)
    elif get_origin(hint) is not tuple and isinstance(value, hint):
        return value
    raise TypeError(f"{name}: {value!r}")


def _is_ours(slot: Slot, change: Kdamond) -> bool:
    """Tells a slot of ours from one that somebody has taken over since.

    A crash may have come between making the context and marking it, where nothing is lost by
    emptying it, or between starting the kdamond and recording its pid, where the mark tells.
    """
    if slot.update_us != change.mark_us:
        return not slot.is_on and not slot.targets
    return not slot.is_on or change.pid is None or slot.kdamond == change.pid
