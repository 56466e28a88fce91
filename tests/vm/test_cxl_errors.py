# SPDX-License-Identifier: Apache-2.0
"""What CXL devices tell of errors, and what tierd does about it. QEMU's devices lose no data."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from guests.guest import Completed, Guest
from guests.tiering import FOLDER, Tierd, tierd
from guests.topology import Emulator, cxl
from guests.workloads import Hotset, hotset

ONE = cxl(512, emulator=Emulator.FAST)
DEBUG = "/sys/kernel/debug/cxl/mem0"
REGION = "/sys/bus/cxl/devices/region0"
MEMORY = "/sys/devices/system/memory"
KEPT = f"{FOLDER}/state/cxl_errors.json"
"""What the next daemon would go on with."""
PAGE_BYTES = 4096
WITHIN_S = 120

RULE = """
[[target]]
command = "nobody"  # what moves is moved for errors alone
[cxl]
"""
EVACUATE = RULE + 'on_error = "evacuate"\nfence_after = 3\n'
MEDIA = {
    "path": "/machine/peripheral/mem0",
    "log": "failure",
    "flags": 0,
    "type": 0,
    "sub-type": 0,
    "transaction-type": 1,
}


def tierctl(guest: Guest, *words: str, check: bool = True) -> Completed:
    return guest.run(["tierctl", *words], timeout=WITHIN_S, check=check)


def number(guest: Guest, path: str) -> int:
    return int(guest.read(path), 0)


def whole(guest: Guest) -> tuple[int, int]:
    """Where CXL memory begins, and its size."""
    return number(guest, f"{REGION}/resource"), number(guest, f"{REGION}/size")


class Mine:
    """A workload whose buffer is on CXL memory, and its pages there as it began."""

    def __init__(self, guest: Guest, load: Hotset) -> None:
        self._guest, self._load = guest, load
        self.frames = self.in_memory(*whole(guest))

    def in_memory(self, start: int, size: int) -> list[int]:
        """Its physical pages of these addresses."""
        words = ["python", "-S", "-m", "faults.frames", self._load.pid, start, size]
        done = self._guest.run([str(word) for word in words], timeout=WITHIN_S)
        found: list[int] = json.loads(done.stdout)
        return found


@contextmanager
def on_cxl(guest: Guest) -> Iterator[Mine]:
    """The workload inside the block; its data are verified at the end."""
    with hotset(guest, "--mib", "16", "--hot-mib", "4", "--node", "1") as load:
        load.sample()
        yield Mine(guest, load)


class Poison:
    """Has the device say that data are lost at addresses of the host."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._start = number(guest, f"{REGION}/resource")
        self._places: list[int] = []

    def inject(self, *addresses: int) -> None:
        for address in addresses:
            self._write("inject_poison", address)
            self._places.append(address)

    def clear(self) -> None:
        """Has it forget that, whereby zeros are written: the pages must be nobody's by then."""
        while self._places:
            self._write("clear_poison", self._places.pop())

    def _write(self, name: str, address: int) -> None:
        self._guest.write(f"{DEBUG}/{name}", f"{address - self._start:#x}".encode())


@pytest.fixture
def poison(guest: Guest) -> Iterator[Poison]:
    made = Poison(guest)
    yield made
    made.clear()


def told(running: Tierd) -> Mapping[str, Any]:
    cxl: Mapping[str, Any] = (running.status or {}).get("cxl", {"errors": [], "evacuations": []})
    return cxl


def counted(running: Tierd) -> Counter[tuple[str, str]]:
    errors = told(running)["errors"]
    assert {(error["device"], error["region"]) for error in errors} <= {("mem0", "region0")}
    return Counter({(error["kind"], error["severity"]): error["count"] for error in errors})


def emptied(running: Tierd) -> int:
    """Pages moved out of the only block that is evacuated; 0 as long as some are there."""
    (evacuation,) = told(running)["evacuations"] or [{"done": False}]
    done = evacuation["done"] and not evacuation["mapped_pages"]
    return evacuation["moved_pages"] if done else 0


def noted(running: Tierd, step: str) -> bool:
    return any(step in note for note in (running.status or {"notes": []})["notes"])


def wait(running: Tierd, holds: Callable[[], bool]) -> None:
    """Waits until it holds; tierd's rounds take a second."""
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline, f"{told(running)} {running.process.stderr}"
        time.sleep(0.5)


@pytest.mark.guest(ONE)
def test_errors_are_counted_and_nothing_else_by_default(guest: Guest, poison: Poison) -> None:
    with tierd(guest, settings=RULE) as running:
        running.wait_until_up()
        with on_cxl(guest) as mine:
            lost = [mine.frames[100] * PAGE_BYTES, mine.frames[200] * PAGE_BYTES]
            poison.inject(*lost)
            listed = json.loads(tierctl(guest, "cxl", "poison", "--json").stdout)["poison"]
            assert sorted(place["start"] for place in listed["mem0"]) == sorted(lost)
            for descriptor in (0, 1):  # corrected, and not
                dpa = 0x3000000 + 64 * descriptor
                guest.qmp("cxl-inject-general-media-event", **MEDIA, descriptor=descriptor, dpa=dpa)
            wait(running, lambda: counted(running).total() >= 4)
        poison.clear()
        wait(running, lambda: counted(running).total() >= 6)
        assert counted(running) == {
            ("poison", "uncorrected"): 2,  # though listed after it was told of
            ("poison_cleared", "none"): 2,
            ("general_media", "corrected"): 1,
            ("general_media", "uncorrected"): 1,
        }
        assert told(running)["evacuations"] == told(running)["fenced"] == []
        assert running.moved == {}
        log = running.process.stderr
    assert "CXL device mem0: data of its memory are lost (poison), in region0" in log
    kept = json.loads(guest.read(KEPT))["places"]
    guest.run(["rm", KEPT])
    assert [place["kind"] for place in kept] == ["general_media"], "the others were cleared"


@pytest.mark.guest(ONE)
def test_a_block_with_poison_is_evacuated_and_a_bad_device_fenced(doomed_guest: Guest) -> None:
    """The block cannot come online before the next boot."""
    guest, poison = doomed_guest, Poison(doomed_guest)
    size = int(guest.read(f"{MEMORY}/block_size_bytes"), 16)
    with tierd(guest, settings=EVACUATE) as running:
        running.wait_until_up()
        with on_cxl(guest) as mine:
            lost = mine.frames[100]
            block = lost * PAGE_BYTES // size
            poison.inject(lost * PAGE_BYTES)
            wait(running, lambda: emptied(running) > 0)
            (evacuation,) = told(running)["evacuations"]
            assert (evacuation["block"], evacuation["node"]) == (block, 1)
            assert evacuation["bad_pages"] == 1
            assert noted(running, f"tierctl cxl retire {block}")
            assert mine.in_memory(block * size, size) == [lost], evacuation
            moved_pages = emptied(running)
            with on_cxl(guest) as later:  # what is free around lost data is given away first
                wait(running, lambda: emptied(running) > moved_pages)
                assert later.in_memory(block * size, size) == [], told(running)["evacuations"]
            in_use = tierctl(guest, "cxl", "retire", f"{block}", check=False)
            assert in_use.rc == 1
            assert "1 poisoned pages" in in_use.stderr
            assert guest.read(f"{MEMORY}/memory{block}/state") == b"online\n"
            poison.inject(*(frame * PAGE_BYTES for frame in mine.frames[200:202]))
            wait(running, lambda: told(running)["fenced"] != [])
            assert told(running)["fenced"] == [{"node": 1, "device": "mem0"}]
            assert noted(running, "tierctl drain 1 --undo")
        tierctl(guest, "cxl", "retire", f"{block}")
        assert guest.read(f"{MEMORY}/memory{block}/state") == b"offline\n"
        tierctl(guest, "drain", "1", "--undo", "--config", f"{FOLDER}/tierd.toml")
        wait(running, lambda: told(running)["fenced"] == [])
