# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tierd.kernel.memory_tiers import read_memory_tiers
from tierd.kernel.text import UnexpectedContent
from tierd.kernel.vmstat import read_vmstat


def test_counters_that_are_absent_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    path = tmp_path / "proc/vmstat"
    path.write_text("nr_free_pages 12\npgmigrate_success 16384\npgpromote_success 0\n")
    counts = read_vmstat(tmp_path)
    assert (counts.pgmigrate_success, counts.pgpromote_success) == (16384, 0)
    assert (counts.pgmigrate_fail, counts.pgdemote_kswapd) == (None, None)


@pytest.mark.parametrize("content", ["pgmigrate_success\n", "pgmigrate_success many\n", "a b c\n"])
def test_garbled_counters(tmp_path: Path, content: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text(content)
    with pytest.raises(UnexpectedContent, match="not names and numbers"):
        read_vmstat(tmp_path)


def test_memory_tiers(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/virtual/memory_tiering"
    for name, nodes in (("memory_tier4", "0,2\n"), ("memory_tier22", "1\n"), ("power", "9")):
        (folder / name).mkdir(parents=True)
        (folder / name / "nodelist").write_text(nodes)
    assert read_memory_tiers(tmp_path) == {0: 4, 2: 4, 1: 22}
    (folder / "memory_tier4/nodelist").write_text("zero")
    with pytest.raises(UnexpectedContent, match="memory_tier4/nodelist"):
        read_memory_tiers(tmp_path)


def test_kernel_without_memory_tiers(tmp_path: Path) -> None:
    assert read_memory_tiers(tmp_path) == {}
