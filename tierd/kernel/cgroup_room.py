# SPDX-License-Identifier: Apache-2.0
"""What a cgroup may still take of memory: memory.max and memory.high of cgroup v2.

Follows Documentation/admin-guide/cgroup-v2.rst; a limit holds for all that is below it::

    memory.current    183689216
    memory.high       max
    memory.max        1073741824
"""

from pathlib import Path

from tierd.kernel import text

_CGROUPS = Path("sys/fs/cgroup")
_LIMITS = ("memory.max", "memory.high")


def read_room_bytes(cgroup: str, root: Path = Path("/")) -> int | None:
    """Returns what can be taken before the first limit is met, None where there is no limit.

    Args:
        cgroup: as /proc/PID/cgroup has it, such as /user.slice.
        root: where /sys is.

    Raises:
        UnexpectedContent: a file is not as documented.
    """
    folder = root / _CGROUPS / cgroup.strip("/")
    rooms = []
    for place in (folder, *folder.parents):
        if not place.is_relative_to(root / _CGROUPS):
            break
        limits = (text.read(place / name) for name in _LIMITS)
        limited = [_number(place, limit) for limit in limits if limit not in (None, "max")]
        if limited:
            used = text.read_int(place / "memory.current") or 0
            rooms.append(max(0, min(limited) - used))
    return min(rooms, default=None)


def _number(place: Path, limit: str | None) -> int:
    if limit is None or not limit.isdecimal():
        raise text.UnexpectedContent(place / "memory.max", str(limit), "a size or max")
    return int(limit)
