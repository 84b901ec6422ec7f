"""What torch.compile makes of torchtitan's tapes: what its partitioner keeps, what its graphs hold while they run.

Read from the lists of saved values and the code that PyTorch 2.11 writes of torchtitan 0.2.2's blocks and loss.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mofa.blocks.build import head_tapes
from mofa.blocks.frameworks.recompute import recompute_of_layer
from mofa.blocks.frameworks.torchtitan.layer import PRIMITIVES
from mofa.blocks.recomputation import Recompute
from mofa.cost.block.liveness import block_memory
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import RecomputeSpec
from tests.blocks.small import EXPERTS, framework, llama
from tests.blocks.test_torchtitan import (
    GQA,
    HQ,
    KV,
    LINEARS,
    TOKENS,
    D,
    F,
    Q,
    V,
    context,
    layer,
    ops_named,
    per_token,
    saved,
    size,
)


def test_compiled_llama_block_under_autocast() -> None:
    """What PyTorch 2.11's partitioner keeps of torchtitan's block, read from its list of saved values.

    fp32 input (4 D); bf16: two norm outputs, what attention adds to the stream (6 D), q, k, v, attention's output,
    three of SwiGLU's four tensors; every weight's bf16 copy, which products of the backward pass read.
    """
    ctx = context(mode="autocast", compile_=True)
    tapes = layer(ctx)
    assert saved(tapes) == TOKENS * (10 * D + 2 * (2 * Q + 2 * KV + 3 * F) + 4 * HQ + 8) + 2 * LINEARS
    assert saved(layer(ctx, Recompute("full", early_stop=True))) == TOKENS * 4 * D


def test_attention_compiled_by_itself_casts_its_input_once() -> None:
    """Beside experts: the norm's input in fp32 (4 D) and one bf16 input (2 D) of q, k and v, raw q and k."""
    model = llama(attention={**GQA, "qk_norm": True}, moe=EXPERTS)
    compiled, eager = (layer(context(model, "autocast", compile_=c)) for c in (True, False))
    casts = {op.name for op in compiled.forward.ops if op.name.endswith(".cast")}
    assert {"attn.cast", "router.gate.cast", "experts.in.cast"} <= casts
    assert not casts & {"wq.cast", "wk.cast", "wv.cast", "experts.w1.cast", "experts.w3.cast"}
    (norm,) = ops_named(compiled.forward.ops, "q_norm")
    (chain,) = ops_named(eager.forward.ops, "q_norm")
    assert (norm.launches, chain.launches) == (1, 8)
    assert size(compiled, "attn_norm.out") == size(eager, "attn_norm.out") == TOKENS * 4 * D


def test_compiled_block_drops_one_of_four() -> None:
    """SiLU's output is computed again; the rest is a product's or attention's operand and stays."""
    tapes = layer(context(compile_=True))
    assert per_token(tapes) == 2 * (4 * D + 2 * Q + 2 * KV + 3 * F) + 4 * HQ + 8
    eager = layer(context())
    assert sum(op.launches for op in tapes.forward.ops) < sum(op.launches for op in eager.forward.ops)
    compiled = {op.name for op in tapes.forward.ops if op.compiled}
    assert {"wq", "mlp.act", "rope"} <= compiled
    assert not any(name.startswith("fsdp") for name in compiled)
    assert not any(op.compiled for op in eager.forward.ops + eager.backward.ops)


def test_ddp_cuts_a_compiled_block_where_a_weight_fills_a_bucket() -> None:
    """Dynamo's DDPOptimizer at 100 MiB: kept besides are SiLU's output and a bf16 input of w3's own, 2 F + 2 D."""
    wide = llama(hidden=4096, attention={**GQA, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
                 mlp={"activation": "swiglu", "ffn_hidden": 14336})  # fmt: skip
    one = context(wide, mode="autocast", compile_=True)
    ddp = replace(one, framework=one.framework.model_copy(update={"data_parallel": "ddp"}))
    whole, cut = (block_memory(layer(ctx), 1).saved[0] for ctx in (one, ddp))
    assert cut - whole == TOKENS * (2 * 14336 + 2 * 4096)
    narrow = context(mode="autocast", compile_=True)
    small = replace(narrow, framework=narrow.framework.model_copy(update={"data_parallel": "ddp"}))
    assert block_memory(layer(small), 1).saved[0] == block_memory(layer(narrow), 1).saved[0]


def test_a_compiled_graph_holds_the_gradient_it_was_given() -> None:
    """Autograd's call of a compiled graph has its arguments until it returns; eager ops let go of theirs."""

    def last_reader(model: ModelSpec | None, given: str, compile_: bool) -> str:
        ops = layer(context(model, compile_=compile_)).backward.ops
        return [op.name for op in ops if given in op.reads][-1]

    assert last_reader(None, "d:out", True) == "accumulate x at attn_norm"
    assert last_reader(None, "d:out", False).startswith("out.add.backward")  # views of it
    experts = llama(moe=EXPERTS)
    assert last_reader(experts, "d:experts.w2.out", True) == "experts.w1.wgrad"
    assert last_reader(experts, "d:experts.w2.out", False) == "experts.w2.wgrad"


def test_checkpoint_around_experts_repeats_all_of_a_compiled_block() -> None:
    """Its parts are compiled, the checkpoint is eager; of a dense block the compiler drops what nobody reads."""
    spec, full = framework("torchtitan", compile=True), RecomputeSpec.parse("full")
    for model, early in ((llama(), True), (llama(moe=EXPERTS), False)):
        forward = layer(context(model, compile_=True)).forward
        assert recompute_of_layer(spec, full, forward, model).early_stop is early


def test_compiled_loss_keeps_bf16_logits() -> None:
    tapes = head_tapes(context(mode="bf16", compile_=True), PRIMITIVES)
    memory = block_memory(tapes, 1)
    assert memory.saved[0] == TOKENS * (2 * V + 4 * D + 4 + 4)
    assert memory.backward_peak[0] == pytest.approx(TOKENS * (4 * V + 4 * D), rel=1e-3)


def test_compiled_loss_split_by_tp_keeps_fp32() -> None:
    """What inductor writes of it: forward bf16 logits, fp32 zeros with the targets and their sum with the
    probabilities (10 V), which is kept (4 V); backward it and the logits' gradient (6 V)."""
    tapes = head_tapes(context(mode="bf16", tp=2, compile_=True), PRIMITIVES)
    memory = block_memory(tapes, 1)
    ends = TOKENS * (2 * D / 2 + 2 * D)
    assert memory.forward_peak[0] == pytest.approx((2 + 4 + 4) * V * TOKENS / 2 + ends, rel=1e-2)
    assert memory.saved[0] == pytest.approx(4 * V * TOKENS / 2 + ends, rel=1e-2)
    assert memory.backward_peak[0] == pytest.approx((4 + 2) * V * TOKENS / 2 + ends, rel=1e-2)


def test_compiled_blocks_with_an_eager_loss() -> None:
    """As torchtitan before spring 2025: the loss alone is that of a run that is not compiled."""
    compiled = context(mode="bf16", compile_=True)
    eager_loss = replace(compiled, framework=compiled.framework.model_copy(update={"compile_loss": False}))
    names = [op.name for op in head_tapes(eager_loss, PRIMITIVES).forward.ops]
    assert "loss.cross_entropy" in names
    assert "loss.compiled" in [op.name for op in head_tapes(compiled, PRIMITIVES).forward.ops]
    assert block_memory(head_tapes(eager_loss, PRIMITIVES), 1).saved[0] > TOKENS * 4 * V


def test_checkpoints_that_stop_early_repeat_all_but_the_last_product() -> None:
    """PyTorch's own do (llm-foundry's under FSDP), torchtitan's where they are told to."""
    full = RecomputeSpec.parse("full")
    assert recompute_of_layer(framework("fsdp1"), full, None, llama()).early_stop
    early = recompute_of_layer(framework("torchtitan", early_stop=True), full, None, llama())

    def repeated(recompute: Recompute) -> set[str]:
        return {op.name for op in layer(context(llama()), recompute).backward.ops if op.repeated}

    to_the_end = repeated(recompute_of_layer(framework("torchtitan"), full, None, llama()))
    assert {"mlp.w2~", "out.add~"} <= to_the_end
    assert "mlp.act_product~" in repeated(early)
    assert not {"mlp.w2~", "out.add~"} & repeated(early)
