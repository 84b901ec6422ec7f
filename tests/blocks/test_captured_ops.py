"""Which ops CUDA graphs hold, and what is copied into and out of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mofa.blocks.build import BlockTapes, CostedLayerKind, layer_forward_tape, layer_tapes
from mofa.blocks.frameworks.megatron.captured_ops import graph_captured_embedding_or_head, graph_captured_layer
from mofa.blocks.frameworks.recompute import recompute_of_layer
from mofa.blocks.op import GRAPH_POOL, Op, Tape
from mofa.blocks.work import Collective, HostSync
from mofa.specs.strategy import RecomputeSpec
from tests.blocks.ops import moved, one
from tests.blocks.small import EXPERTS, context, framework, llama, primitives

DENSE, MOE = llama(), llama(moe={**EXPERTS, "shared_hidden": 64})


def layer(graphs: str, *, moe: bool = False, recompute: str = "none", padded: bool = False, **facts: Any) -> BlockTapes:
    ctx = context(MOE if moe else DENSE, framework("megatron", cuda_graphs=graphs), **facts)
    if padded:
        ctx = replace(ctx, fixed_rows=True, capacity_factor=1.0)
    forward = layer_forward_tape(ctx, primitives(ctx), CostedLayerKind(moe))
    repeated = recompute_of_layer(ctx.framework, RecomputeSpec.parse(recompute), forward, ctx.model)
    tapes = layer_tapes(ctx, primitives(ctx), CostedLayerKind(moe), repeated, forward)
    return graph_captured_layer(tapes, ctx, moe=moe)


def names_in_graphs(tape: Tape) -> set[str]:
    return {op.name for op in tape.ops if op.graph is not None}


def launched(tape: Tape) -> list[Op]:
    """Ops that the host issues one by one."""
    return [op for op in tape.ops if op.graph is None and op.work is not None and op.launches]


def test_without_graphs_a_layer_stays_as_it_is() -> None:
    tapes = layer("none")
    assert not names_in_graphs(tapes.forward) | names_in_graphs(tapes.backward)
    assert all(op.pool != GRAPH_POOL for op in (*tapes.forward.ops, *tapes.backward.ops))


@pytest.mark.parametrize("graphs", ["local", "te"])
def test_a_whole_layer_is_one_launch_each_way_and_copies(graphs: str) -> None:
    tapes = layer(graphs)
    for tape in (tapes.forward, tapes.backward):
        assert len({id(op.graph) for op in tape.ops if op.graph is not None}) == 1
        assert all(op.pool == GRAPH_POOL and op.module_call is None for op in tape.ops if op.graph is not None)
    copies = {op.name for tape in (tapes.forward, tapes.backward) for op in launched(tape)}
    own = {"graph.copy_parameters_gradients"}
    of_engine = {"graph.copy_input", "graph.make_mask", "graph.copy_gradient"}
    assert copies == (own | of_engine if graphs == "te" else own)


def test_engine_s_graphs_copy_the_input_and_a_mask_of_a_byte_a_pair() -> None:
    tapes = layer("te", micro_batch=2.0)
    x = tapes.forward.tensors["x"].bytes
    seq = context(DENSE, framework("megatron"), micro_batch=2.0).seq_len
    assert moved(one(tapes.forward, "graph.copy_input")) == 2 * x
    assert tapes.forward.tensors["graph.mask"].bytes == 2 * seq**2
    assert moved(one(tapes.forward, "graph.make_mask")) == 3 * 2 * seq**2
    assert moved(one(tapes.backward, "graph.copy_gradient")) == 2 * x
    assert "graph.mask" not in layer("te:mlp").forward.tensors


def test_gradients_of_parameters_are_copied_in_two_bytes_each() -> None:
    tapes = layer("local")
    params = sum(op.weight_params for op in tapes.forward.ops)
    copy = one(tapes.backward, "graph.copy_parameters_gradients")
    assert (moved(copy), copy.scratch, copy.launches) == (2 * 2 * params, 2 * params, 6)  # four weights, two norms
    (launch,) = {op.graph for op in tapes.backward.ops if op.graph is not None}
    assert launch.num_hooks == 6


def test_static_inputs_stay_until_the_graph_of_the_way_back() -> None:
    def bytes_kept(tapes: BlockTapes) -> float:
        lives = tapes.lifetimes
        return float(np.sum([lives.intervals[i].bytes for i in lives.saved]))

    plain, engine = layer("none"), layer("te")
    more = engine.forward.tensors["graph.mask"].bytes + engine.forward.tensors["graph.input"].bytes
    assert bytes_kept(engine) - bytes_kept(plain) == more
    assert bytes_kept(layer("local")) == bytes_kept(plain)


def test_parts_are_held_by_name() -> None:
    everything = names_in_graphs(layer("te").forward)
    attention, mlp = names_in_graphs(layer("te:attn").forward), names_in_graphs(layer("te:mlp").forward)
    assert attention and mlp and not attention & mlp and attention | mlp == everything
    assert "mid.add" in attention and "out.add" in mlp


def test_of_experts_the_router_and_what_waits_for_no_host_is_held() -> None:
    router = names_in_graphs(layer("te:moe_router", moe=True).forward)
    preprocess = names_in_graphs(layer("te:moe_router+moe_preprocess", moe=True).forward)
    assert {"mlp_norm", "router.topk"} < router and {op for op in router if "shared" in op}
    assert preprocess - router >= {"moe.count", "moe.permute"}
    for graphs in ("te:attn+moe_router+moe_preprocess", "te:moe_router"):
        tapes = layer(graphs, moe=True)
        outside = [op for op in tapes.forward.ops if op.graph is None]
        assert any(isinstance(op.work, HostSync) for op in outside)
        assert {"experts.fc1", "experts.fc2", "moe.unpermute", "moe.counts_to_host"} <= {op.name for op in outside}
        last = max(i for i, op in enumerate(tapes.forward.ops) if op.graph is not None and "shared" not in op.name)
        assert all(i > last for i, op in enumerate(tapes.forward.ops) if op.name == "moe.counts_to_host")


@pytest.mark.parametrize("graphs", ["local", "te", "te:attn+moe"])
def test_experts_padded_to_a_capacity_are_held_with_their_exchanges(graphs: str) -> None:
    tapes = layer(graphs, moe=True, padded=True, ep=4)
    for tape in (tapes.forward, tapes.backward):
        assert not any(isinstance(op.work, HostSync) for op in tape.ops)
        assert {op.name for op in launched(tape)} <= {
            "graph.copy_input", "graph.make_mask", "graph.copy_gradient", "graph.copy_parameters_gradients",
        }  # fmt: skip
    exchanges = {op.name for op in tapes.forward.ops if isinstance(op.work, Collective)}
    assert exchanges >= {"moe.dispatch", "moe.combine"} and exchanges <= names_in_graphs(tapes.forward)
    (launch,) = {op.graph for op in tapes.backward.ops if op.graph is not None}
    assert launch.num_hooks == sum(op.num_weights for op in tapes.forward.ops if op.weight) + 2  # the norms


def test_what_is_computed_again_within_a_graph_is_held_too() -> None:
    tapes = layer("te", recompute="selective:mlp")
    again = [op for op in tapes.backward.ops if op.repeated and op.work is not None]
    assert again and all(op.graph is not None for op in again)


def test_a_full_iteration_leaves_nothing_to_issue() -> None:
    tapes = layer("local:full_iteration", recompute="full")
    ctx = context(DENSE, framework("megatron", cuda_graphs="local:full_iteration"))
    assert graph_captured_embedding_or_head(tapes, ctx).forward.ops
    assert not launched(tapes.forward) and not launched(tapes.backward)
