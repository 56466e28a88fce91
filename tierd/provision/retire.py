# SPDX-License-Identifier: Apache-2.0
"""Takes a block of memory with poisoned pages out of use.

Follows mm/memory-failure.c and mm/memory_hotplug.c. A page that is given to hard_offline_page is
never given to anybody again; one that a process has is taken from it, and whoever touches it then
gets SIGBUS, as from the hardware. A block that is taken offline has its other pages moved, and one
with a page that was so given up cannot come online again before the next boot::

    hard_offline_page     0x691000000
    memory210/state       offline

A poisoned page that is in use would be read by that move, so it is given up first, or nothing is
done. There is nothing to undo: each write is whole by itself, and the block stays out of use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierd.errors import Conflict, NotFound
from tierd.kernel import frames
from tierd.kernel.blocks import MEMORY
from tierd.kernel.cxl_events import CxlEvent
from tierd.kernel.frames import Frames
from tierd.kernel.tunable import Files
from tierd.model import PAGE_BYTES, CxlRegion

OFFLINE = "offline"
GIVE_UP = MEMORY / "hard_offline_page"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """What takes a block out of use: the frames to give up first, and those of them in use."""

    block: int
    offline: bool
    give_up: tuple[int, ...]
    in_use: tuple[int, ...]

    @property
    def writes(self) -> list[tuple[Path, str]]:
        """The files below / with what is written to them, in order."""
        if self.offline:
            return []
        pages = [(GIVE_UP, f"{frame * PAGE_BYTES:#x}") for frame in self.give_up]
        return [*pages, (state_of(self.block), OFFLINE)]


def state_of(block: int) -> Path:
    return MEMORY / f"memory{block}" / "state"


def addresses(event: CxlEvent, regions: Iterable[CxlRegion]) -> range:
    """Returns where lost data are for the host; over all devices where these are interleaved."""
    if event.start is None:
        return range(0)
    ways = (region.interleave_ways for region in regions if region.name == event.region)
    return range(event.start, event.start + event.size_bytes * max(ways, default=1))


def bad_frames(block: range, events: Iterable[CxlEvent], regions: Sequence[CxlRegion]) -> Frames:
    """Returns those of a block's frames that hold lost data."""
    lost = (addresses(event, regions) for event in events)
    pages = ((part.start // PAGE_BYTES, -(-part.stop // PAGE_BYTES)) for part in lost)
    return frames.join(range(max(p, block.start), min(end, block.stop)) for p, end in pages)


def frames_of(block: int, block_bytes: int) -> range:
    """Returns the numbers of a block's frames."""
    pages = block_bytes // PAGE_BYTES
    return range(block * pages, (block + 1) * pages)


def plan(block: int, bad: Frames, files: Files, root: Path = Path("/")) -> Retirement:
    """Looks at what is to be done.

    Args:
        block: its number.
        bad: the frames in it that are poisoned.
        files: how /sys is read.
        root: where /sys and /proc are.

    Raises:
        NotFound: there is no such block.
        OSError: /proc/kpageflags is out of reach.
    """
    state = root / state_of(block)
    if not files.exists(state):
        raise NotFound(f"there is no memory block {block}", hint="see: tierctl cxl list")
    offline = files.read(state) == OFFLINE
    told = () if offline else (frame for part in frames.parts_of(bad) for frame in part)
    left = [frame for frame in told if not frames.is_poisoned(frame, root)]
    in_use = tuple(frame for frame in left if not frames.is_free(frame, root))
    return Retirement(block=block, offline=offline, give_up=tuple(left), in_use=in_use)


def retire(wanted: Retirement, files: Files, root: Path = Path("/"), *, force: bool) -> None:
    """Takes the block out of use.

    Args:
        wanted: of plan().
        files: how /sys is written.
        root: where it is.
        force: whether poisoned pages that are in use are given up, too.

    Raises:
        Conflict: some are, and are not to be; or a page of the block cannot be moved.
    """
    if wanted.in_use and not force:
        raise Conflict(
            f"{len(wanted.in_use)} poisoned pages of memory block {wanted.block} are in use, and "
            "would be read if it were taken offline",
            hint=f"end the programs that have memory there, or: tierctl cxl retire {wanted.block} "
            "--give-up, whereupon a program that touches one of them is killed",
        )
    for path, value in wanted.writes:
        try:
            files.write(root / path, value)
        except OSError as error:
            raise Conflict(
                f"memory block {wanted.block} stays in use: {path.name}: {error.strerror}",
                hint="some page of it cannot be moved now: end what holds memory of it, and try "
                f"again: tierctl cxl retire {wanted.block}",
            ) from error
