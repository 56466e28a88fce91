# SPDX-License-Identifier: Apache-2.0
"""The example of docs/plugins.md: that it is right, and serves an arena."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import tierd.tiers
from tests.unit.drawer import failing
from tierd.arena import Arena
from tierd.errors import TierdError
from tierd.tiers.kit import TierContract
from tierd.tiers.memory import dram

DOCUMENT = Path(__file__).parents[2] / "docs/plugins.md"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The document's example, installed; returns the source of its tests."""
    text = DOCUMENT.read_text()
    example, tests = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (entry,) = re.findall(r"```toml\n\[project.entry-points.(\".*?\")\]\n(.*?)```", text, re.DOTALL)
    (tmp_path / "file_tier.py").write_text(example)
    information = tmp_path / "file_tier-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: file-tier\nVersion: 1.0\n")
    group, names = entry
    names = names.replace('"', "")
    (information / "entry_points.txt").write_text(f"[{group.strip(chr(34))}]\n{names}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "file_tier", raising=False)
    importlib.invalidate_caches()
    return str(tests)


def test_the_documents_example_is_right(installed: str) -> None:
    scope: dict[str, object] = {}
    exec(compile(installed, str(DOCUMENT), "exec"), scope)
    contract = scope["TestFileTier"]
    assert isinstance(contract, type)
    assert issubclass(contract, TierContract)
    assert failing(contract()) == []


def test_the_documents_example_serves_an_arena(installed: str, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "capacity_bytes": 32 * 4096}
    tier = tierd.tiers.load("file", options)
    data = np.random.default_rng(1).integers(0, 256, (30, 4096), dtype=np.uint8)
    with Arena(4096, [dram(8 * 4096), tier]) as arena:
        arena.write(range(30), data)
        assert (arena.read(range(30)) == data).all()
        assert set(arena.places(range(30)).tolist()) == {0, 1}
        assert arena.fenced == {}


def test_a_full_disk_is_met_before_anything_is_on_it(installed: str, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "capacity_bytes": 1 << 60}
    tier = tierd.tiers.load("file", options)
    with pytest.raises(TierdError, match=r"tier file: reserve: OSError: .*(No space|too large)"):
        Arena(1 << 20, [dram(1 << 20), tier])
