"""torchtitan's experts with tensor parallelism, and the Python around their exchanges, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mofa.blocks.context import Context
from mofa.blocks.work import Collective, MemoryBound
from mofa.calibrate.shapes.routed import scored_product_bytes_per_element
from tests.blocks.small import EXPERTS, LATENT, llama
from tests.blocks.test_torchtitan import TOKENS, D, context, layer, ops_named


def all_reduced(ctx: Context) -> dict[str, float]:
    """Bytes that a layer's backward all-reduces over tp, by the op."""
    found = {}
    for op in layer(ctx).backward.ops:
        if isinstance(op.work, Collective) and op.work.kind == "all_reduce" and op.work.group == "tp":
            found[op.name] = float(np.max(op.work.payload))
    return found


def test_gradients_of_experts_under_tensor_parallelism_are_summed_product_by_product() -> None:
    """What (the backward of) a layer all-reduces over tp 2, bf16: two norms' gradients; of shared experts the input's
    gradient from each product; of the latent its own, and that of the weight which makes it; of routed rows theirs
    where the experts' weights are split (etp 2). The gathered input's gradient is cut, not reduced.

    Counted on torchtitan's DeepSeek model over a fake process group by a mode that sees every op.
    """
    latent, low, turned = 64, 128, 16
    assert (latent, low, turned) == tuple(LATENT[n] for n in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"))
    model = llama(attention=LATENT, moe=EXPERTS | {"shared_hidden": 512})
    norms = {f"fsdp.partial_gradient.{i}": 2.0 * D for i in range(2)}
    made = {"fsdp.partial_gradient.2": 2.0 * D * (latent + turned)}
    sums = {f"shared.{w}.sum_gradients.backward": 2.0 * TOKENS * D for w in ("w1", "w3")}
    sums |= {"wkv_b.sum_gradients.backward": 2.0 * TOKENS * latent, "wq_b.sum_gradients.backward": 2.0 * TOKENS * low}
    assert all_reduced(context(model, tp=2, ep=2)) == pytest.approx(norms | made | sums)
    rows = {"moe.routed.sum_gradients.backward": 2.0 * TOKENS * 2 * D}  # top 2
    assert all_reduced(context(model, tp=2, ep=2, etp=2)) == pytest.approx(norms | made | sums | rows)
    assert all_reduced(context(llama(moe=EXPERTS), tp=2, ep=2)) == pytest.approx(norms)
    cut = ops_named(layer(context(model, tp=2, ep=2)).backward.ops, "moe.all_gather.backward")
    assert [op.work for op in cut] == [MemoryBound(2.0 * TOKENS / 2 * D * 2.0, "copy")]


def test_python_around_exchanges_of_experts() -> None:
    """Functions of Python forward: 5 up to the wait for the counts (2 more in pipelines, of FSDP's call), 8 behind it,
    4 + 4 around the way back; 4 around a block whose weights stay gathered. None without expert parallelism."""

    def functions(**changes: Any) -> dict[str, float]:
        ops = layer(context(llama(moe=EXPERTS), **changes)).forward.ops
        return {op.name: float(np.max(op.autograd_functions)) for op in ops if np.any(op.autograd_functions)}

    experts = {"moe.counts": 5.0, "moe.plan": 8.0, "moe.zeros": 8.0}
    assert functions(ep=2) == experts
    assert functions(ep=2, pipelined=True) == experts | {"moe.counts": 7.0, "out.add": 4.0}
    assert functions() == {}


def test_weighted_sum_takes_four_experts_at_a_time() -> None:
    """Top 5 and top 7 walk over their experts in two rounds, top 3 in one; a round is 4 bytes at the curve's rate."""

    def product(top_k: int) -> tuple[float, float]:
        tapes = layer(context(llama(moe=EXPERTS | {"num_experts": 16, "top_k": top_k}), ep=2))
        (sums,) = ops_named(tapes.forward.ops, "moe.sum")
        (back,) = ops_named(tapes.backward.ops, "moe.sum.backward")
        assert isinstance(sums.work, MemoryBound) and isinstance(back.work, MemoryBound)
        assert (sums.work.like, back.work.like, back.work.width) == ("score_product", "score_product_bwd", top_k)
        return float(np.max(sums.work.bytes)), float(np.max(back.work.elements))

    assert [product(top_k)[0] for top_k in (3, 5, 7)] == [4.0 * TOKENS * D * rounds for rounds in (1, 2, 2)]
    assert product(5)[1] == 5.0 * TOKENS * D


@pytest.mark.parametrize(("precision", "end"), [("mixed", "_fp32"), ("autocast", "")])
@pytest.mark.parametrize("top_k", [2, 8])
def test_weighted_sum_of_timed_numbers_of_experts_takes_their_curves(precision: str, end: str, top_k: int) -> None:
    """Bytes as the benchmark counts them: experts' outputs and their sum, back twice."""
    model = llama(moe=EXPERTS | {"num_experts": 16, "top_k": top_k})
    tapes = layer(context(model, precision_mode=precision, residual_element_bytes=4 if precision == "autocast" else 2))
    (sums,) = ops_named(tapes.forward.ops, "moe.sum")
    (back,) = ops_named(tapes.backward.ops, "moe.sum.backward")
    for op, way in ((sums, ""), (back, "_bwd")):
        assert isinstance(op.work, MemoryBound)
        assert op.work.like == (name := f"score_product{way}_top{top_k}{end}")
        assert float(np.max(op.work.bytes)) == pytest.approx(
            scored_product_bytes_per_element(name) * top_k * TOKENS * D
        )


@pytest.mark.parametrize(("precision", "like"), [("mixed", "index_backward"), ("autocast", "row_backward_fp32")])
def test_gradients_put_on_rows_are_issued_in_16_bits_and_moved_in_32(precision: str, like: str) -> None:
    ctx = context(
        llama(moe=EXPERTS), precision_mode=precision, residual_element_bytes=4 if precision == "autocast" else 2
    )
    tapes = layer(ctx)
    (back,) = ops_named(tapes.backward.ops, "moe.permute.backward")
    (put,) = ops_named(tapes.forward.ops, "moe.unpermute")
    assert isinstance(back.work, MemoryBound) and isinstance(put.work, MemoryBound)
    assert (back.work.like, put.work.like) == (like, "index_put" if precision == "mixed" else "index_put_fp32")
    rows = float(np.max(put.work.bytes)) / (2 * ctx.residual_element_bytes)
    assert float(np.max(back.work.bytes)) == pytest.approx(rows * (2 if precision == "mixed" else 12))
