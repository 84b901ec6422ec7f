"""Who splits layers over chunks, and tables of several layouts."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest

from mofa.cost.estimate import estimate_table
from mofa.cost.layer_split import _balanced_sizes, active_params_of_layer, layer_split_of
from mofa.specs.load import load_workload
from mofa.specs.shared_facts import load_shared_facts
from tests.cost.toy import cluster, framework, llama, mla_moe, table, workload


@pytest.mark.parametrize(
    ("name", "layers", "pp", "vpp", "splits", "layout", "by", "text"),
    [
        ("megatron", 32, 4, 2, "even", "", "framework", "Et*4|(t*4|)*6t*4L"),
        ("megatron", 30, 4, 1, "even", "", "mofa", "Et*8|t*9|t*9|t*4L"),
        ("megatron", 6, 4, 2, "even", "", "mofa", "E|(t|)*6L"),
        ("megatron-2022", 12, 4, 1, "greedy-embeddings", "", "framework", "Et*3|t*4|t*4|tL"),
        ("torchtitan", 16, 4, 1, "even", "", "framework", "Et*4|t*5|t*4|t*3L"),
        ("torchtitan", 16, 4, 1, "even", "Et*4|t*4|t*4|t*4L", "strategy", "Et*4|t*4|t*4|t*4L"),
        ("megatron", 30, 4, 1, "even", "decoder-last-pipeline-num-layers:6", "strategy", "Et*8|t*8|t*8|t*6L"),
    ],
)  # fmt: skip
def test_who_splits(name: str, layers: int, pp: int, vpp: int, splits: str, layout: str, by: str, text: str) -> None:
    """A strategy's layout first, then the framework's own rule, then mofa's where there is none."""
    split = layer_split_of(llama(num_layers=layers), pp, vpp, name, splits, layout)
    assert (split.made_by, split.layout.text) == (by, text)
    assert sum(split.layout.layers_by_chunk) == layers


def test_predictions_are_with_the_loss_without_a_layout() -> None:
    """Megatron puts them on the last stage (multi_token_prediction.py, get_mtp_num_layers_to_build)."""
    split = layer_split_of(load_workload("deepseek-v3").model, 16, 1, "megatron")
    assert split.layout.text.endswith("mL")
    assert split.made_by == "mofa"
    assert split.layout.prediction_chunk == 15


def test_rows_of_several_layouts_are_costed_each_with_its_own() -> None:
    """A table of them equals its rows, each costed alone."""
    job, machines, spec = workload(mla_moe(num_layers=6)), cluster(16), framework("megatron")
    strategies = [
        f"pp=4 vpp=2 ep=2 micro_batch=1 recompute=full{layout}"
        for layout in ("", " layout=Et|t|t|t|t|t||mL", " layout=Et|t|t|t|t|t|m|L", " layout=Etttttt|||||||mL")
    ]
    with pytest.raises(ValueError, match="rank 1 would hold nothing"):
        table(job, machines, spec, strategies)
    rows = table(job, machines, spec, strategies[:3])
    together = estimate_table(job, machines, spec, rows)
    for i in range(3):
        alone = estimate_table(job, machines, spec, rows.select_rows(np.array([i])))
        assert alone.step_s[0] == pytest.approx(together.step_s[i], rel=1e-12)
        assert alone.device_bytes[0] == pytest.approx(together.device_bytes[i], rel=1e-12)
    assert len(set(together.step_s.tolist())) == 3
    assert [rows.row(i, "megatron").layout for i in range(3)] == [
        "", "Et|t|t|t|t|t||mL", "Et|t|t|t|t|t|m|L",
    ]  # fmt: skip


def heaviest_and_cuts(weights: list[float], first: float, last: float, num_chunks: int) -> tuple[float, list[int]]:
    """Of all ways to cut the one whose heaviest chunk is lightest, with every cut, from the last on, the earliest."""
    n = len(weights)
    ways = []
    for cuts in combinations(range(1, n), num_chunks - 1):
        bounds = [0, *cuts, n]
        sums = [sum(weights[a:b]) for a, b in pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        ways.append((max(sums), [b - a for a, b in pairwise(bounds)]))
    return min(ways, key=lambda way: way[0])


@pytest.mark.parametrize("num_chunks", [2, 3, 5])
@pytest.mark.parametrize("first_k_dense", [0, 1, 4])
def test_balanced_chunks_are_the_lightest(num_chunks: int, first_k_dense: int) -> None:
    changes = {"model.num_layers": 9, "model.moe.first_k_dense": first_k_dense}
    model = load_workload("deepseek-v3", overrides=changes).model
    sizes = _balanced_sizes(model, num_chunks)
    weights = [active_params_of_layer(model, model.is_moe_layer(i)) for i in range(9)]
    head = float(model.vocab * model.hidden)
    ends = (
        load_shared_facts().layers.embedding_param_cost.value * head,
        head + model.num_mtp_layers * (weights[-1] + head),
    )
    bounds = [0, *accumulate(sizes)]
    sums = [sum(weights[a:b]) for a, b in pairwise(bounds)]
    sums[0] += ends[0]
    sums[-1] += ends[1]
    assert max(sums) == pytest.approx(heaviest_and_cuts(weights, *ends, num_chunks)[0], rel=1e-12)
    assert min(sizes) >= 1


def test_a_thousand_layers_are_balanced_at_once() -> None:
    model = load_workload("llama3-8b", overrides={"model.num_layers": 1000}).model
    sizes = _balanced_sizes(model, 992)
    assert len(sizes) == 992
    assert sum(sizes) == 1000
