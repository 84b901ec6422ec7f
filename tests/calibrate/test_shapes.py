"""The shapes: the same on every machine, held-out ones never in the grid, drawn from the bundled workloads."""

from collections import Counter
from pathlib import Path

import pytest

from mofa.calibrate.cases import MODELS
from mofa.calibrate.shapes.families import FAMILIES, MIN_POINTS, all_cases_of_family
from tests.committed import read_yaml

HELD_OUT = {"gemm": 100, "grouped_gemm": 60, "attention": 60, "memory_bound": 60, "collective": 60}


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_are_reproducible_and_distinct(family: str) -> None:
    one, two = all_cases_of_family(family, gpus=4), all_cases_of_family(family, gpus=4)
    assert [c.identity for c in one] == [c.identity for c in two]
    assert len({c.identity for c in one}) == len(one) > 0
    assert sum(c.split == "heldout" for c in one) >= HELD_OUT.get(family, 0)


def test_quick_is_a_fraction_and_part_of_the_whole() -> None:
    quick, whole = all_cases_of_family("gemm", quick=True), all_cases_of_family("gemm")
    assert len(quick) < 0.3 * len(whole)
    assert {c.identity for c in quick} <= {c.identity for c in whole}


@pytest.mark.parametrize("family", ["memory_bound", "compiled"])
def test_quick_measures_of_every_op_as_much_as_a_fit_needs(family: str) -> None:
    grid = Counter(c.op for c in all_cases_of_family(family, quick=True) if c.split == "grid")
    assert set(grid.values()) == {MIN_POINTS}


@pytest.mark.parametrize(
    "family", ["gemm", "grouped_gemm", "attention", "memory_bound", "compiled", "collective", "chunked_moe"]
)
def test_the_fresh_set_comes_on_top_and_shares_no_shape(family: str) -> None:
    plain, more = all_cases_of_family(family, gpus=4), all_cases_of_family(family, gpus=4, fresh=True)
    fresh = [c for c in more if c.split == "fresh"]
    assert [c for c in more if c.split != "fresh"] == plain
    assert not {c.identity for c in fresh} & {c.identity for c in plain}
    assert len(fresh) == len({c.identity for c in fresh}) >= 24


def test_ring_attention_meets_half_of_the_keys_and_half_of_the_queries() -> None:
    shapes = [c.shape for c in all_cases_of_family("attention") if c.split == "grid" and not c.shape_size("causal")]
    ratios = {int(s["kv"]) / int(s["q"]) for s in shapes if s["q"] == 8192}
    assert ratios == {0.5, 1.0, 2.0}


def test_dimensions_are_those_of_the_bundled_workloads() -> None:
    folder = Path(__file__).parents[2] / "workloads"
    found = {}
    for path in folder.glob("*.yaml"):
        model = read_yaml(path).get("model")
        if isinstance(model, dict):
            found[path.stem] = model
    for dims in MODELS:
        model = found.get(dims.name)
        if model is None:
            continue
        assert (model["hidden"], model["vocab"]) == (dims.hidden, dims.vocab), dims.name
        assert model["attention"]["num_heads"] == dims.heads, dims.name
        if dims.experts:
            moe = model["moe"]
            assert (moe["num_experts"], moe["top_k"], moe["expert_hidden"]) == (
                dims.experts,
                dims.top_k,
                dims.expert_hidden,
            )
