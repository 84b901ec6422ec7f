"""Searches over toy models on 16 GPUs, each made once for the tests of all files."""

from __future__ import annotations

from functools import cache

from mofa.search.entry_points import find_plans
from mofa.search.search_result import Search
from mofa.specs.model import ModelSpec
from tests.cost.toy import cluster, framework, llama, mla_moe, moe_llama, workload

HEADS = {"kind": "gqa", "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
BIG = {"hidden": 2048, "vocab": 32768, "mlp": {"ffn_hidden": 8192}, "attention": HEADS}
MODELS: dict[str, ModelSpec] = {
    "dense": llama(num_layers=16, **BIG),
    "moe": moe_llama(num_layers=8, **BIG, moe={"num_experts": 8, "top_k": 2, "expert_hidden": 2048}),
    "mla": mla_moe(num_layers=8),
}
GIB = {"dense": 12.0, "moe": 16.0, "mla": 8.0}
MAXIMUM: dict[str, dict[str, int]] = {
    "dense": {"tp": 4, "cp": 2, "pp": 2, "vpp": 2, "micro_batch": 2},
    "moe": {"tp": 2, "cp": 1, "pp": 2, "vpp": 2, "micro_batch": 2},
    "mla": {"tp": 2, "cp": 1, "pp": 2, "vpp": 2, "micro_batch": 1},
}  # fmt: skip
"""A part of the rows, of every kind of row some: what is true of them is true of the others."""


def search_every_row(model: str, name: str, jobs: int = 1) -> Search:
    """A search that costs every legal row."""
    job = workload(MODELS[model], seq_len=4096, global_batch=32)
    machines = cluster(16, memory_gib=GIB[model])
    return find_plans(
        job, machines, framework=framework(name), top=3, replay=False, banded=False, jobs=jobs, every_row=True,
        maximum=MAXIMUM[model], closed_form_margin=False,
    )  # fmt: skip


@cache
def costed_whole(model: str, name: str) -> Search:
    """The search in one part, in this process, for all that is held against it."""
    return search_every_row(model, name)


@cache
def search(model: str = "dense", name: str = "megatron", top: int = 10, memory_gib: float | None = None) -> Search:
    """A search that a replay is to follow, by closed forms; bands are tests/search/to_plan/test_step_band.py's."""
    return judged(model, name, top, memory_gib, closed_form_margin=False)


@cache
def judged(model: str, name: str, top: int, memory_gib: float | None, *, closed_form_margin: bool = True) -> Search:
    """A search by closed forms, by default with their own margin."""
    job = workload(MODELS[model], seq_len=4096, global_batch=32)
    machines = cluster(16, memory_gib=memory_gib or GIB[model])
    return find_plans(
        job, machines, framework=framework(name), top=top, replay=False, banded=False, maximum=MAXIMUM[model],
        closed_form_margin=closed_form_margin,
    )  # fmt: skip
