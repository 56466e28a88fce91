# SPDX-License-Identifier: Apache-2.0
"""Kills `tierctl cxl create` and `drain` before each write, and looks at what is undone then.

    python -m faults.regions free
    python -m faults.regions make MEMDEV...
    python -m faults.regions kill MEMDEV...
    python -m faults.regions kill-drain MEMDEV...

They run in a guest, as root. The first frees all CXL memory, and the second makes a region of it
again. The third kills a creation of a region of these devices before each write to /sys and to the
journal, has what is left undone as `tierctl cxl list` would, and prints as JSON how many kills were
undone, how many had made all by then, and what was not as before. The fourth does so with a drain
of such a region, of which now and then a killed one is gone on with instead. All runs are children
of this process, which has imported all.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from faults import tracer
from faults.tracer import Call
from tierd.cli import control
from tierd.kernel.blocks import read_blocks
from tierd.kernel.cxl_regions import Regions
from tierd.kernel.tunable import KernelFiles
from tierd.provision.create import look, undo_left
from tierd.provision.plan import Found

FOLDER = Path("/run/tierd-regions")
STATE, CONFIG, STDERR = FOLDER / "state", FOLDER / "tierd.toml", FOLDER / "stderr"
ROOT = Path("/")
WITHIN_S = 120
MOST_WRITES = 200
RESUMED_EACH = 4


def take_apart() -> None:
    """Frees the memory of all regions; of those of one device, the last one first."""
    regions = Regions(ROOT, KernelFiles())
    for region in sorted(look().regions, key=lambda region: region.decoders, reverse=True):
        assert region.root is not None
        regions.unplug(region.name)
        for decoder in reversed(region.decoders):
            regions.release(decoder, region.size_bytes // region.interleave_ways)
        regions.delete(region.name, region.root)


def as_now() -> Found:
    """What there is, but for what has no way back: the modes of decoders, and the next names."""
    found = look()
    decoders = tuple(replace(decoder, mode=None) for decoder in found.decoders)
    return replace(found, decoders=decoders, next_regions={})


def creation(memdevs: Sequence[str]) -> list[str]:
    """Returns the words of the command that makes a region."""
    return ["create", *(word for memdev in memdevs for word in ("--memdev", memdev))]


def tierctl(words: Sequence[str]) -> int:
    """Does what a command of tierctl cxl does; returns its exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    command = ["cxl", *words, "--config", str(CONFIG)]
    control.main(command, prog_name="tierctl", standalone_mode=False)
    return 0


def run(words: Sequence[str], most: int) -> tuple[int, bool]:
    """Runs a command, killed before the next write after so many; tells whether it was."""
    writes, killed = 0, False

    def before(call: Call) -> bool:
        nonlocal writes, killed
        is_ours = any(p.startswith("/sys/") or "journal.jsonl" in p for p in call.paths)
        if call.name != "write" or not is_ours:
            return True
        killed = killed or writes >= most
        writes += 1
        return not killed

    ending = tracer.run(partial(tierctl, words), STDERR, before=before, within_s=WITHIN_S)
    wanted = -signal.SIGKILL if killed else 0
    assert ending.rc == wanted, ending.stderr
    return writes, killed


def kill(memdevs: Sequence[str]) -> dict[str, object]:
    """Kills before each write in turn, until one run comes to its end."""
    before, findings = as_now(), list[str]()
    undone = kept = 0
    for most in range(MOST_WRITES):
        _, killed = run(creation(memdevs), most)
        told = undo_left(STATE, ROOT, KernelFiles())
        is_whole = any("made whole" in line for line in told)
        if not killed or is_whole:
            take_apart()
        if killed and (told or most):
            undone, kept = undone + (not is_whole), kept + is_whole
        if as_now() != before:
            findings.append(f"after {most} writes: {as_now()} and not {before}; told {told}")
            take_apart()
        findings += [line for line in told if "could not" in line or "left as it is" in line]
        if not killed:
            break
    return {"undone": undone, "kept": kept, "findings": findings}


State = tuple[Found, list[tuple[int, str, tuple[str, ...]]]]


def memory_now() -> State:
    """What there is, with the blocks of memory."""
    found = as_now()
    starts = ((region.start, region.size_bytes) for region in found.regions)
    ranges = [range(start, start + size) for start, size in starts if start is not None]
    return found, [(b.number, b.state, b.zones) for b in read_blocks(ranges)]


def drain(memdevs: Sequence[str], most: int) -> tuple[State, bool]:
    """Drains a region, made where there is none, killed before a write; returns what was before."""
    if not as_now().regions:
        run(creation(memdevs), MOST_WRITES)
    before = memory_now()
    return before, run(["drain"], most)[1]


def kill_drains(memdevs: Sequence[str]) -> dict[str, object]:
    """Kills a drain before each write in turn, until one run comes to its end."""
    free, findings = as_now(), list[str]()
    ends = {"undone": 0, "finished": 0, "resumed": 0}
    for most in range(MOST_WRITES):
        before, killed = drain(memdevs, most)
        if not killed:
            break
        told = undo_left(STATE, ROOT, KernelFiles())
        findings += [line for line in told if "could not" in line or "left as it is" in line]
        is_back = memory_now() == before
        ends["undone" if is_back else "finished"] += 1
        if not is_back and as_now() != free:
            findings.append(f"undone after {most} writes: {memory_now()}, not {before}; {told}")
            take_apart()
        if most % RESUMED_EACH == 0:
            drain(memdevs, most)
            run(["drain"], MOST_WRITES)
            ends["resumed"] += 1
            if as_now() != free:
                findings.append(f"resumed after {most} writes: {memory_now()}")
                take_apart()
    if as_now() != free:
        findings.append(f"after a drain: {memory_now()}")
    return {**ends, "findings": findings}


def main(arguments: Sequence[str]) -> None:
    """Does what the command line says."""
    command, *memdevs = arguments
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    CONFIG.write_text(f'[daemon]\nstate_dir = "{STATE}"\n')
    if command == "kill":
        sys.stdout.write(json.dumps(kill(memdevs)) + "\n")
        return
    take_apart()
    if command == "kill-drain":
        sys.stdout.write(json.dumps(kill_drains(memdevs)) + "\n")
    if command == "make":
        tierctl(creation(memdevs))


if __name__ == "__main__":
    main(sys.argv[1:])
