# SPDX-License-Identifier: Apache-2.0
"""./scripts/demo --arena, briefly, and what it sweeps with."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from sweeps.demo import main
from sweeps.far import Far
from sweeps.layers import Sweep, Work, ahead, on_demand, seconds_of, some_layers

from tests.unit.drawer import failing
from tierd.arena import Lookahead
from tierd.errors import Damaged
from tierd.tiers import Tier
from tierd.tiers.kit import TierContract


class TestFar(TierContract):
    def make(self) -> Tier:
        return Far(8 * self.block_bytes)


def test_a_simulated_speed_is_right_too_and_told() -> None:
    class Simulated(TierContract):
        def make(self) -> Tier:
            return Far(8 * self.block_bytes, 1e9)

    assert failing(Simulated()) == []
    assert "simulated" in Simulated().make().facts.name


def test_the_demo_in_short(tmp_path: Path) -> None:
    """Whether it is faster is the machine's affair in so short a time; what it tells is not."""
    file = tmp_path / "demo.json"
    done = CliRunner().invoke(main, ["--seconds", "1", "--fast-mib", "8", "--json", str(file)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    told = json.loads(file.read_text())
    assert done.exit_code == (0 if told["with_prefetch"] > told["without_prefetch"] else 1)
    assert "far tier at 512 MiB/s each way (simulated)" in done.output
    assert "copies a layer" in done.output
    assert all(len(line) <= 100 for line in done.output.splitlines())
    assert told["moves_without"] > 1.5, "on demand each layer goes out and comes in"
    assert told["late"] < 0.5


def test_each_layer_is_checked() -> None:
    layers = some_layers(8, 4096)
    sweep = Sweep(layers, 4)
    work = Work(layers, 3 * 4096)
    with sweep.arena() as arena:
        steps = ahead(Lookahead(arena, range(8), repeats=True))
        assert seconds_of(steps, work, 16) > 0
        steps.close()
        arena.write([5], np.zeros(4096, np.uint8))
        with pytest.raises(Damaged, match="layer 5 is not what it was"):
            seconds_of(on_demand(arena), work, 8)
