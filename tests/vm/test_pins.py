# SPDX-License-Identifier: Apache-2.0
"""Parts of a real process that are pinned: by an operator, and by the name of a mapping."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from guests.guest import Guest
from guests.tiering import FOLDER, PAGE_KIB, tierd, until
from guests.topology import slow_node
from guests.workloads import Hotset, hotset

MIB, HOT_MIB, PINNED_MIB = 64, 8, 16
COLD_MIB = MIB - HOT_MIB

SETTINGS = """
[[target]]
command = "hotset"
pin = { "[stack]" = "here" }
"""


@pytest.mark.guest(slow_node())
def test_a_cold_range_is_pinned_to_the_fastest_and_hot_memory_where_it_is(guest: Guest) -> None:
    options = ("--mib", f"{MIB}", "--hot-mib", f"{HOT_MIB}", "--share", "98", "--node", "1")
    with hotset(guest, *options) as load, tierd(guest, settings=SETTINGS) as running:
        until(load, running, lambda: load.sample().hot_share >= 0.95)
        buffer, stack = mapping(guest, load, is_buffer), mapping(guest, load, is_stack)
        assert pinned(guest, load) == [("configuration", "here", stack)]
        last = range(buffer.stop - (PINNED_MIB << 20), buffer.stop)
        inside = range(last.start + 1, last.stop - 1)
        assert tierctl(guest, "pin", load, inside) == (
            f"process {load.pid}: {spell(last)} is pinned: fastest\n"
        )
        until(load, running, lambda: cold_on_fast(load) >= 0.98 * PINNED_MIB)
        refused = guest.run(
            ["tierctl", "pin", f"{load.pid}", "--range", "1000-2000", *config()], check=False
        )
        assert "1000-2000 is not all mapped" in refused.stderr
        tierctl(guest, "unpin", load, last)
        tierctl(guest, "pin", load, range(buffer.start, last.start), "--here")
        load.move_window()
        moved = next(s for s in load.samples(60) if s.window)
        until(load, running, lambda: is_kept(guest))
        assert load.sample().hot_share <= moved.hot_share, "it is hot, and stays"
        tierctl(guest, "unpin", load)
        until(load, running, lambda: load.sample().hot_share >= 0.95)
        assert pinned(guest, load) == [("configuration", "here", stack)]


def config() -> tuple[str, str]:
    return "--config", f"{FOLDER}/tierd.toml"


def tierctl(guest: Guest, what: str, load: Hotset, part: range | None = None, *more: str) -> str:
    words = () if part is None else ("--range", spell(part))
    return guest.run(["tierctl", what, f"{load.pid}", *words, *more, *config()]).stdout


def spell(part: range) -> str:
    return f"{part.start:x}-{part.stop:x}"


def cold_on_fast(load: Hotset) -> float:
    """In MiB."""
    sample = load.sample()
    return (sample.cold_pages - sample.cold_on_slow) * PAGE_KIB / 1024


def is_kept(guest: Guest) -> bool:
    """Whether most of the new hot window is told to be pinned where it is."""
    told = json.loads(guest.run(["tierctl", "status", "--json", *config()]).stdout)
    kept = told["kept"].get("it is pinned where it is", 0)
    return bool(kept >= 0.5 * (HOT_MIB << 20))


def pinned(guest: Guest, load: Hotset) -> list[tuple[str, str, range]]:
    words = ["tierctl", "explain", f"{load.pid}", "--json", *config()]
    told: dict[str, Any] = json.loads(guest.run(words).stdout)
    return [(pin["by"], pin["pin"], range(pin["start"], pin["end"])) for pin in told["pins"]]


def mapping(guest: Guest, load: Hotset, wanted: Callable[[range, str], bool]) -> range:
    """The one mapping that is wanted."""
    found = []
    for line in guest.run(["cat", f"/proc/{load.pid}/maps"]).stdout.splitlines():
        addresses, _, rest = line.partition(" ")
        start, _, end = addresses.partition("-")
        part = range(int(start, 16), int(end, 16))
        if wanted(part, rest):
            found.append(part)
    (only,) = found
    return only


def is_buffer(part: range, rest: str) -> bool:
    return len(part) >= MIB << 20 and rest.startswith("rw")


def is_stack(part: range, rest: str) -> bool:
    return rest.endswith("[stack]")
