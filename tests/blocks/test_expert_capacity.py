"""What dropping tokens beyond a capacity adds to Megatron's layer of experts, and what padding to it takes away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mofa.blocks.build import BlockTapes
from mofa.blocks.context import Context
from mofa.blocks.fp8 import FP8_RECIPES
from mofa.blocks.frameworks.megatron.expert_capacity import (
    fills_last_pieces,
    rows_of_whole_pieces,
    rows_over_chosen_copies,
)
from mofa.blocks.op import Op
from mofa.blocks.work import HostSync
from mofa.cost.block.block_cost import num_ranks_with_meeting_hosts
from mofa.cost.kernels.topology import ProcessGroup
from mofa.routing.rank_load import routing_loads
from mofa.specs.load import load_workload
from mofa.specs.routing import RoutingSpec
from tests.blocks.ops import moved, one
from tests.blocks.small import EXPERTS, build, context, framework, llama

MOE = llama(moe=EXPERTS)


def expert_context(factor: float | None = None, *, pad: bool = False, **facts: Any) -> Context:
    return replace(context(MOE, framework("megatron"), **facts), capacity_factor=factor, fixed_rows=pad)


def layer(factor: float | None = None, *, pad: bool = False, **facts: Any) -> BlockTapes:
    return build(expert_context(factor, pad=pad, **facts), moe=True)


def present(ops: tuple[Op, ...]) -> set[str]:
    return {op.name for op in ops if np.all(op.present)}


def test_dropping_chooses_among_the_scores_and_keeps_what_it_chose() -> None:
    plain, dropping = layer(), layer(1.5)
    drop = one(dropping.forward, "router.drop")
    assert "router.drop" not in present(plain.forward.ops)
    assert (drop.launches, moved(drop)) == (6, 30 * 512 * 8)
    assert set(drop.writes) == set(drop.saves) == {"router.taken_scores", "router.taken_map"}
    permute = one(dropping.forward, "moe.permute")
    assert "router.taken_scores" in permute.reads and "router.scores" not in permute.reads
    back = one(dropping.backward, "router.drop.backward")
    assert (back.launches, moved(back)) == (1, 9 * 512 * 8)


def test_a_host_waits_for_counts_that_dropping_leaves_open_and_for_none_that_are_padded() -> None:
    waits = [
        sum(isinstance(op.work, HostSync) for op in layer(factor, pad=pad).forward.ops)
        for factor, pad in ((None, False), (1.0, False), (1.0, True))
    ]
    assert waits[0] == waits[1] > waits[2] == 0


@pytest.mark.parametrize(("ep", "sorts"), [(1, False), (4, True)])
def test_padded_rows_of_several_ranks_are_turned_around_in_a_copy(ep: int, sorts: bool) -> None:
    padded, plain = layer(1.0, pad=True, ep=ep).forward, layer(ep=ep).forward
    assert ("moe.sort" in present(padded.ops), "moe.unsort" in present(padded.ops)) == (sorts, sorts)
    assert "moe.sort" in present(plain.ops)  # by a map of rows, whoever sends them
    assert "moe.sort_map" in plain.tensors and "moe.sort_map" not in padded.tensors


def test_as_many_rows_are_sent_as_the_capacity_has() -> None:
    sent = {
        (factor, pad): rows_over_chosen_copies(expert_context(factor, pad=pad))
        for factor, pad in ((None, False), (1.25, False), (1.25, True))
    }
    assert sent == {(None, False): 1.0, (1.25, False): 1.0, (1.25, True): 1.25}
    assert layer(1.25, pad=True).forward.tensors["moe.sent"].bytes == 1.25 * layer().forward.tensors["moe.sent"].bytes


def test_fp8_rows_of_a_capacity_are_padded_where_they_end_within_a_piece() -> None:
    """``Fp8Padding`` returns its input where all numbers of rows are whole pieces (te/module/fp8_padding.py)."""
    ctx = replace(expert_context(1.0, pad=True), fp8=FP8_RECIPES["delayed"])
    rows = np.array([8 * 64.0, 8 * 65.0, 8 * 80.0])
    np.testing.assert_array_equal(fills_last_pieces(ctx, rows), [False, True, False])
    np.testing.assert_array_equal(rows_of_whole_pieces(ctx, rows), [8 * 64.0, 8 * 80.0, 8 * 80.0])
    assert fills_last_pieces(replace(ctx, fixed_rows=False), rows) is True


def test_a_capacity_is_whole_rows_of_each_source_rank() -> None:
    """``get_capacity`` rounds up (transformer/moe/moe_utils.py): 512 tokens to 2 of 8 experts, 1.001 times 128 rows."""
    ctx = expert_context(1.001, pad=True)
    spec = ctx.model.moe
    assert spec is not None and (ctx.shard_tokens, spec.num_experts) == (512.0, 8)
    each = 512.0 * spec.top_k / 8
    assert rows_over_chosen_copies(ctx) * each == pytest.approx(each + 1.0)


def test_padded_rows_are_counted_once_and_no_host_waits_for_their_number() -> None:
    """An exchange has the bytes of the rows sent, padding among them, times what a rank sends over the mean."""
    workload = load_workload("qwen3-30b-a3b")
    padded = workload.model_copy(update={"routing": RoutingSpec(capacity_factor=1.25, pad_to_capacity=True)})
    assert routing_loads(padded.routing, padded.model, [8]).sent_bytes_over_mean == {8: 1.0}
    groups = {"etp_ep": ProcessGroup(np.array([8]), np.array([8]), np.array([8]))}
    assert num_ranks_with_meeting_hosts(padded, groups) is None
    assert num_ranks_with_meeting_hosts(workload, groups) == 8
