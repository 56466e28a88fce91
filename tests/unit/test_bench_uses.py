# SPDX-License-Identifier: Apache-2.0
"""The parts of `./scripts/bench uses` that can be held against something else."""

import numpy as np
import pytest
from benches.uses import (
    LLAMA_3_8B,
    MIXTRAL,
    Case,
    Lookups,
    Mixture,
    adam,
    by_hindsight,
    cases,
    embeddings,
    of_lru,
    shares,
)
from benches.uses import Work as Digests


def test_all_that_is_measured_fits_into_2_gib() -> None:
    """All fast, with prefetch and without are there at the same time."""
    for case in cases():
        assert (case.blocks + 2 * (case.blocks + 4 + case.fast)) * case.block_bytes < 2 << 30


def test_the_shapes_are_those_they_are_named_after() -> None:
    assert LLAMA_3_8B.block_bytes == 2 * 32 * 2 * 16 * 8 * 128
    assert MIXTRAL.numbers * 8 * 8 == 3 * 4096 * 14336


def test_hits_by_hindsight_and_of_lru() -> None:
    blocks = np.array([0, 1, 2, 0, 1, 2, 0, 0])
    assert by_hindsight(blocks, 1) == pytest.approx(50)
    assert of_lru(blocks, 2, 0) == pytest.approx(12.5)
    assert of_lru(blocks, 3, 4) == pytest.approx(100)


def test_what_a_router_foresees_is_right_in_nine_of_ten() -> None:
    mixture = Mixture(layers=3, experts=16, selected=4, numbers=32, tokens=500)
    chosen, foreseen = mixture.routes(np.random.default_rng(2))
    assert chosen.shape == foreseen.shape == (1500, 4)
    assert all(len(set(step)) == 4 for step in foreseen.tolist())
    right = np.mean([np.isin(f, c).mean() for f, c in zip(foreseen, chosen, strict=True)])
    assert right == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("use", ["states", "experts"])
def test_a_case_in_small(use: str) -> None:
    mixture = Mixture(layers=2, experts=4, selected=2, numbers=2048, tokens=2)
    begin = adam(4096) if use == "states" else mixture.begin
    case = Case(name=use, block_bytes=4096, blocks=8, fast=4, begin=begin)
    figures = shares(case, Digests(), rounds=1)
    assert [figure.unit for figure in figures] == ["", "", "s"]
    assert all(figure.value > 0 for figure in figures)


def test_embeddings_in_small() -> None:
    table = Lookups(rows=1 << 13, width=16, block_bytes=1024, batch=256, exponent=1.1, batches=800)
    figures = {figure.name: figure for figure in embeddings(table)}
    assert figures["Criteo's rows: lookups, all fast"].value > 0
    assert all(0 <= f.value <= 100 for f in figures.values() if f.unit == "%")
