# SPDX-License-Identifier: Apache-2.0
"""The trees of /sys and /proc that were captured in guests, as folders for `root: Path`.

A file of trees/ is the output of tests/vm/guests/capture.py; ./scripts/capture-tree renews it.
"""

import json
from pathlib import Path

TREES = Path(__file__).with_name("trees")

NAMES = sorted(path.stem for path in TREES.glob("*.json"))
"""cxl-6.12, cxl-7.2, cxl-interleaved, cxl-two-regions, cxl-two-tiers-7.2, flat, hmat, numa, ..."""


def unpack(name: str, into: Path) -> Path:
    """Makes the tree of that name in a folder, and returns the folder: the `root` to read from."""
    tree = json.loads((TREES / f"{name}.json").read_text())
    for folder in tree["folders"]:
        (into / folder).mkdir(parents=True, exist_ok=True)
    for path, text in tree["files"].items():
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        (into / path).write_text(text)
    for path, target in tree["links"].items():
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        (into / path).symlink_to(target)
    return into
