"""The shapes: the same on every machine, held-out ones never in the grid, drawn from the bundled workloads."""

from pathlib import Path

import pytest
import yaml

from mofa.calibrate.cases import MODELS
from mofa.calibrate.shapes import FAMILIES, cases

HELD_OUT = {"gemm": 100, "grouped_gemm": 60, "attention": 60, "memory_bound": 60, "collective": 60}


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_are_reproducible_and_distinct(family: str) -> None:
    one, two = cases(family, gpus=4), cases(family, gpus=4)
    assert [c.key for c in one] == [c.key for c in two]
    assert len({c.key for c in one}) == len(one) > 0
    assert sum(c.split == "heldout" for c in one) >= HELD_OUT.get(family, 0)


def test_quick_is_a_fraction_and_part_of_the_whole() -> None:
    quick, whole = cases("gemm", quick=True), cases("gemm")
    assert len(quick) < 0.3 * len(whole)
    assert {c.key for c in quick} <= {c.key for c in whole}


def test_dimensions_are_those_of_the_bundled_workloads() -> None:
    folder = Path(__file__).parents[2] / "workloads"
    found = {}
    for path in folder.glob("*.yaml"):
        model = yaml.safe_load(path.read_text(encoding="utf-8")).get("model")
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
