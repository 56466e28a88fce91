# SPDX-License-Identifier: Apache-2.0
"""The counters and memory tiers of the running kernel."""

from dataclasses import asdict
from pathlib import Path

from tierd.kernel.memory_tiers import read_memory_tiers
from tierd.kernel.nodes import read_nodes
from tierd.kernel.vmstat import read_vmstat


def test_counters_are_those_of_the_file() -> None:
    before, after = asdict(read_vmstat()), asdict(read_vmstat())
    with Path("/proc/vmstat").open() as file:
        names = {line.split()[0] for line in file}
    for name, count in before.items():
        assert (count is None) == (name not in names)
        assert count is None or count <= after[name]


def test_every_node_with_memory_is_in_a_kernel_tier() -> None:
    with_memory = {node.id for node in read_nodes() if node.total_bytes}
    assert read_memory_tiers().keys() == with_memory
