"""Roles of ops, which time and memory read, are those that their names say: in the blocks of every framework."""

from __future__ import annotations

import pytest

import mofa
from mofa.blocks.work import Gemm, GroupedGemm
from mofa.cost.estimate import TableEstimator
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.framework import FRAMEWORK_NAMES
from tests.blocks.roles import CLAIMS, origin_of, part_of, purpose_of, role_of


@pytest.mark.parametrize(
    ("name", "model", "strategy"),
    [
        *((name, "llama3-8b", f"{'dp=8' if name == 'fsdp1' else 'dp=4 tp=2 sp=true'} recompute={mode}")
          for name in FRAMEWORK_NAMES for mode in ("none", "full")),
        ("megatron", "mixtral-8x7b", "ep=4 dp=8 recompute=selective:core_attn+moe"),
        ("megatron", "deepseek-v2-lite", "ep=4 dp=8 token_chunks=2 recompute=none"),
        ("megatron-local", "mixtral-8x7b", "ep=2 dp=8 recompute=full"),
        ("torchtitan", "deepseek-v2-lite", "ep=4 dp=8 recompute=ops"),
        ("torchtitan", "qwen3-30b-a3b", "pp=2 vpp=2 schedule=zbv dp=4 recompute=full"),
    ],
)  # fmt: skip
def test_ops_do_what_their_names_say(name: str, model: str, strategy: str) -> None:
    job, nodes, framework = mofa.load_workload(model), mofa.load_cluster("h100-hgx", 8), mofa.load_framework(name)
    table = checked_strategy_row(job, nodes, framework, strategy)
    estimator = TableEstimator(job, nodes, framework, table, routing_loads_by_ep(job, table))
    ops = [op for block in estimator.row_with_every_stage.costs.tapes.values() for tape in (block.forward,
    block.backward)
           for op in tape.ops]  # fmt: skip
    assert len(ops) > 50
    assert [(op.name, op.role) for op in ops if op.role != role_of(op.name)] == []
    assert [(op.name, op.repeated) for op in ops if op.repeated != op.name.endswith("~")] == []
    assert [(op.name, op.part) for op in ops if op.part != part_of(op.name)] == []
    assert [(op.name, op.origin) for op in ops if op.origin != origin_of(op.name)] == []
    assert [(op.name, op.claims) for op in ops if op.claims != CLAIMS.get(op.name, "")] == []
    for op in ops:
        assert purpose_of(op.name) in (None, op.purpose), (op.name, op.purpose)
        # a norm keeps what it scaled its rows by
        scales = any(name.endswith(".rstd") for name in op.saves) and not isinstance(op.work, Gemm | GroupedGemm)
        assert (op.purpose == "norm") == scales or op.repeated, op.name
