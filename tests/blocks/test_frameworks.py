"""No two frameworks have the same tape: what differs between each pair, by what runs and by what is kept."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

import mofa
from mofa.cost.block.block_cost import PrecisionMode, block_costs
from mofa.cost.block.routing_loads import BALANCED
from mofa.cost.precision_modes import rows_by_precision_mode
from mofa.search.one_strategy import checked_strategy_row

NAMES = ("megatron", "megatron-2022", "megatron-local", "torchtitan")
"""fsdp1 is left out: its modules are torchtitan's, what FSDP does around them differs."""


def signature(name: str) -> tuple[tuple[str, ...], float, float]:
    """Ops of a GPT-3 layer and its backward on one of eight GPUs, bytes kept, kernels launched. [-, B, -]"""
    job = mofa.load_workload("gpt3-175b", overrides={"model.num_layers": 4})
    machines, framework = mofa.load_cluster("a100-hgx", 8), mofa.load_framework(name)
    row = checked_strategy_row(job, machines, framework, "recompute=none micro_batch=1")
    mode: PrecisionMode = rows_by_precision_mode(job, framework, row)[0][1]
    costs = block_costs(job, machines, framework, row, BALANCED, mode)
    block = costs.tapes["dense recompute=none"]
    ops = block.forward.ops + block.backward.ops
    kept = float(next(iter(costs.blocks.values()))[0].memory.saved[0])
    return tuple(op.name for op in ops), kept, float(sum(np.max(op.launches) for op in ops))


@pytest.mark.parametrize(("one", "other"), tuple(combinations(NAMES, 2)))
def test_every_pair_of_frameworks_differs(one: str, other: str) -> None:
    ops, kept, launches = signature(one)
    other_ops, other_kept, other_launches = signature(other)
    assert set(ops) != set(other_ops) or launches != other_launches
    assert kept != other_kept or set(ops) != set(other_ops)


def test_what_a_layer_keeps_is_ordered_as_the_frameworks_fuse() -> None:
    """Transformer Engine's fused modules keep less than the local layers of 2022 with their unfused attention."""
    kept = {name: signature(name)[1] for name in NAMES}
    assert kept["megatron"] == kept["megatron-local"]  # the norm's output and input, whoever fuses what
    assert kept["megatron"] < kept["megatron-2022"]
