"""Megatron's experts on Transformer Engine by hand: what is launched, kept, exchanged, and where the host waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mofa.blocks.build import BlockTapes
from mofa.blocks.op import Tape
from mofa.blocks.work import Collective, Gemm, GroupedGemm, HostSync
from tests.blocks.ops import moved, one
from tests.blocks.small import build, context, framework, in_fp8, kept, llama, size

S, B, H, F = 256, 2, 512, 256
TOKENS, EXPERTS, TOP = S * B, 8, 2
ROWS = TOKENS * TOP
MOE = llama(moe={"num_experts": EXPERTS, "top_k": TOP, "expert_hidden": F})


def layer(*, ep: int = 1, tp: int = 1, etp: int = 1, **options: Any) -> BlockTapes:
    ctx = context(MOE, framework("megatron", **options), seq_len=S, micro_batch=B, ep=ep, tp=tp, sp=tp > 1, etp=etp)
    return build(ctx, moe=True)


@pytest.mark.parametrize("ep", [1, 4])
def test_what_a_layer_keeps_of_its_routing(ep: int) -> None:
    """The map of rows (token, 2 E + 1 numbers of 4 bytes), the choice's 12 bytes a copy, scores and map over all
    experts; of a row its sorted copy, its fp32 probability and its places in two sorts."""
    held = {n: b for n, b in kept(layer(ep=ep)).items() if n.startswith(("moe.", "router."))}
    assert held == {
        "router.scores": 4 * TOKENS * EXPERTS, "router.map": TOKENS * EXPERTS, "router.chosen": 12 * ROWS,
        "moe.row_ids": 4 * TOKENS * (2 * EXPERTS + 1), "moe.sorted": 2 * ROWS * H, "moe.sorted_weights": 4 * ROWS,
        "moe.sort_map": 4 * ROWS, "moe.unsort_map": 4 * ROWS,
    }  # fmt: skip


def test_rows_are_sorted_where_a_rank_has_several_experts() -> None:
    """token_dispatcher.py: ``if self.num_local_experts > 1``, whatever ep is; both ways and back."""
    for ep, sorts in ((1, True), (4, True), (8, False)):
        found = layer(ep=ep)
        for name in ("moe.sort", "moe.unsort"):
            assert any(op.name == name for op in found.forward.ops) is sorts
            assert any(op.name == f"{name}.backward" for op in found.backward.ops) is sorts
    assert moved(one(layer().forward, "moe.sort")) == 2 * 2 * ROWS * H


def test_probabilities_go_with_the_rows() -> None:
    """Exchanged apart forward and, by their gradients, back; gathered over the experts' tensor parallelism."""

    def payloads(tape: Tape) -> list[float]:
        return [float(np.asarray(op.work.payload).reshape(-1)[0]) for op in tape.ops
                if isinstance(op.work, Collective) and op.work.kind == "all_to_all"]  # fmt: skip

    found = layer(ep=4)
    assert payloads(found.forward) == [2 * ROWS * H, 4 * ROWS, 2 * ROWS * H]
    assert sorted(payloads(found.backward)) == sorted(payloads(found.forward))
    assert payloads(layer().forward) == []
    split = [op.name for op in layer(tp=2, etp=2).forward.ops]
    assert split.index("moe.etp_gather") < split.index("moe.etp_gather_weights") < split.index("moe.sort")


def test_the_activation_makes_the_probabilities_gradient() -> None:
    """It keeps the first product's output and the probabilities, whose gradient goes back to the router's scores."""
    found = layer()
    act = one(found.forward, "experts.activation")
    assert act.saves == ("experts.fc1", "moe.sorted_weights")
    assert size(found.backward, "d:moe.sorted_weights") == size(found.backward, "d:moe.weights") == 4 * ROWS
    assert "d:router.scores" in one(found.backward, "moe.permute.backward").writes


def test_the_router_computes_in_fp32() -> None:
    """moe_utils.py, RouterGatingLinearFunction: fp32 operands and logits; backward the input is cast again (6 bytes an
    element) and its gradient back (6); the input that is kept is the 16-bit one."""
    found = layer()
    gate = one(found.forward, "router.gate")
    assert isinstance(gate.work, Gemm) and gate.work.format == "fp32" and gate.saves == ("mlp_norm.out",)
    assert size(found.forward, "router.gate.out") == 4 * TOKENS * EXPERTS
    assert moved(one(found.forward, "router.cast")) == 6 * TOKENS * H
    back = one(found.backward, "router.cast.backward")
    assert moved(back) == 12 * TOKENS * H and float(np.asarray(back.scratch).reshape(-1)[0]) == 4 * TOKENS * H
    assert moved(one(found.backward, "router.gate.accumulate")) == 10 * EXPERTS * H


@pytest.mark.parametrize("ep", [1, 4])
def test_the_host_waits_for_the_counts_alone(ep: int) -> None:
    """Before the exchange, which needs its splits; on one rank before the experts, when rows are sorted already."""
    ops = layer(ep=ep).forward.ops
    names = [op.name for op in ops]
    (at,) = [i for i, op in enumerate(ops) if isinstance(op.work, HostSync)]
    assert ops[at].reads == ("moe.counts_on_host",)
    assert one(layer(ep=ep).forward, "moe.counts_to_host").stream == "to_host"
    assert names.index("moe.counts_to_host") < names.index("moe.permute") < at
    if ep > 1:
        assert names.index("moe.counts") < at < names.index("moe.dispatch")
        counts = one(layer(ep=ep).forward, "moe.counts").work
        assert isinstance(counts, Collective) and float(np.asarray(counts.payload).reshape(-1)[0]) == 8 * EXPERTS * ep
    else:
        assert names.index("moe.sort") < at < names.index("experts.fc1")
        assert "moe.counts" not in names


def test_permuted_and_received_rows_are_held_until_the_layer_returns() -> None:
    """moe_layer.py, ``custom_forward``: ``hidden_states`` and ``dispatched_input``."""
    (end,) = [op for op in layer(ep=4).forward.ops if op.name == "moe returns"]
    assert set(end.reads) == {"moe has moe.sent", "moe has moe.dispatch.out"}


def test_products_run_on_several_streams() -> None:
    found = layer(ep=4)
    products = [op.work for op in (*found.forward.ops, *found.backward.ops) if isinstance(op.work, GroupedGemm)]
    assert len(products) == 6 and {work.kernel for work in products} == {"multi-stream"}
    assert not any(work.sequential for work in products)


def test_no_host_asks_for_rows_that_are_padded_to_a_capacity() -> None:
    """token_dispatcher.py, ``drop_and_pad``: nothing is counted, copied to the host or waited for."""
    ctx = replace(context(MOE, framework("megatron"), seq_len=S, micro_batch=B, ep=2), fixed_rows=True)
    asked, padded = (
        {op.name for op in tape.ops} for tape in (layer(ep=2).forward, build(ctx, moe=True).forward)
    )  # fmt: skip
    assert asked - padded == {
        "moe.count", "moe.counts", "moe.count_sums", "moe.counts_to_host", "moe.sync0",
    }  # fmt: skip
    assert padded <= asked


def test_rows_that_were_sorted_or_padded_are_held_until_the_experts_return() -> None:
    """``routed_experts_compute`` has the sorted rows until they are put back, ``TEGroupedMLP.forward`` the padded ones
    and the activation until theirs are cut; fp8 products keep copies of their own."""
    ctx = in_fp8(context(MOE, framework("megatron"), seq_len=S, micro_batch=B, ep=4), "tensorwise")
    tapes = build(ctx, moe=True)
    names, held = [op.name for op in tapes.forward.ops], kept(tapes)
    assert not {"moe.sorted", "experts.padded", "experts.act"} & set(held)
    returned = one(tapes.forward, "experts returns").reads
    assert [name.partition(" has ")[2] for name in returned] == ["experts.padded", "experts.fc1", "experts.act"]
    assert one(tapes.forward, "routed experts returns").reads == ("routed experts has moe.sorted",)
    order = ["experts.unpad", "experts returns", "moe.unsort", "routed experts returns", "moe.combine", "moe returns"]
    assert sorted(order, key=names.index) == order


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
def test_a_gate_weighs_what_shared_experts_say(name: str) -> None:
    """shared_experts.py: a product with one row of weights, whose sigmoid multiplies the output, which is kept."""
    moe = {"num_experts": EXPERTS, "top_k": TOP, "expert_hidden": F, "shared_hidden": 2 * F}
    plain, gated = (
        build(context(llama(moe={**moe, "shared_gate": gate}), framework(name), seq_len=S, micro_batch=B), moe=True)
        for gate in (False, True)
    )
    more = {n: b for n, b in kept(gated).items() if n not in kept(plain)}
    assert more == {"shared.fc2.out": 2 * TOKENS * H, "shared.gate_score": 2 * TOKENS}
    gate = one(gated.forward, "shared.gate")
    assert gate.weight_params == H and gate.region == "moe.shared"
    assert one(gated.forward, "moe.add_shared").reads[1] == "shared.gated"
    assert moved(one(gated.forward, "shared.times_gate")) == 2 * 2 * TOKENS * H
    assert moved(one(gated.backward, "shared.times_gate.backward")) == 6 * 2 * TOKENS * H
