"""Small models and contexts of one combination of degrees, and a slow twin that counts what a backward tape keeps."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from mofa.blocks.build import BlockTapes, CostedLayerKind, layer_tapes
from mofa.blocks.context import Context, Primitives
from mofa.blocks.fp8 import FP8_RECIPES
from mofa.blocks.frameworks.megatron import local as megatron_local
from mofa.blocks.frameworks.megatron import transformer_engine as megatron
from mofa.blocks.op import Op, Tape
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from mofa.blocks.work import Gemm, GroupedGemm
from mofa.specs.framework import FrameworkSpec
from mofa.specs.implied_facts import implied_facts
from mofa.specs.model import ModelSpec
from tests.committed import read_yaml

PROFILES = Path(__file__).parents[2] / "framework_profiles"
PRIMITIVES = {"megatron": megatron.PRIMITIVES, "megatron-local": megatron_local.PRIMITIVES}


def framework(name: str, **options: Any) -> FrameworkSpec:
    """A bundled framework with options changed."""
    facts = read_yaml(PROFILES / f"{name}.yaml")
    return FrameworkSpec.model_validate({**facts, **implied_facts(options), **options})


def gpt(heads: int = 8, hidden: int = 512, dropout: float = 0.1) -> ModelSpec:
    """A GPT layer of 2022: multi-head attention, learned positions, GELU, LayerNorm, biases, dropout."""
    return ModelSpec.model_validate(
        {
            "name": "gpt", "source": "Korthikanti et al. 2022", "num_layers": 2, "hidden": hidden, "vocab": 51200,
            "attention": {
                "kind": "gqa", "num_heads": heads, "num_kv_heads": heads, "head_dim": hidden // heads,
                "qkv_bias": True, "out_bias": True,
            },
            "mlp": {"activation": "gelu", "ffn_hidden": 4 * hidden, "bias": True},
            "norm": "layernorm", "positions": "learned", "max_positions": 8192, "dropout": dropout,
        }
    )  # fmt: skip


def llama(**changes: Any) -> ModelSpec:
    """A dense layer of today: grouped queries, rotary positions, SwiGLU, RMSNorm."""
    facts: dict[str, Any] = {
        "name": "llama", "source": "a small model for tests", "num_layers": 2, "hidden": 512, "vocab": 32000,
        "attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 64},
        "mlp": {"activation": "swiglu", "ffn_hidden": 1536},
    }  # fmt: skip
    return ModelSpec.model_validate({**facts, **changes})


EXPERTS = {"num_experts": 8, "top_k": 2, "expert_hidden": 256}
LATENT = {
    "kind": "mla", "num_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip


def context(
    model: ModelSpec, spec: FrameworkSpec, *, seq_len: int = 256, micro_batch: int = 2, tp: int = 1, sp: bool = False,
    ep: int = 1, etp: int = 1,
) -> Context:  # fmt: skip
    """One combination of degrees, routing balanced."""

    def one(value: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([float(value)])

    rows = 0.0
    if model.moe is not None:
        rows = micro_batch * seq_len / (tp if sp else 1) * model.moe.top_k
    return Context(
        model=model, framework=spec, gemm_format="bf16", seq_len=seq_len, tp=one(tp), sp=np.array([sp]), cp=one(1),
        cp_ring=np.array([False]), ep=one(ep), etp=one(etp), micro_batch=one(micro_batch), fsdp=one(1), efsdp=one(1),
        rows_time=one(rows), rows_memory=one(rows), imbalance=one(1),
    )  # fmt: skip


def in_fp8(ctx: Context, recipe: str) -> Context:
    """The same with products in fp8."""
    return replace(ctx, fp8=FP8_RECIPES[recipe], gemm_format=FP8_RECIPES[recipe].product)


def together(contexts: list[Context]) -> Context:
    """Several combinations of degrees of one model as the arrays of one context."""
    names = [f.name for f in fields(Context) if isinstance(getattr(contexts[0], f.name), np.ndarray)]
    return replace(contexts[0], **{n: np.concatenate([getattr(c, n) for c in contexts]) for n in names})


def primitives(ctx: Context) -> Primitives:
    return PRIMITIVES[ctx.framework.name]


def build(ctx: Context, recompute: Recompute = NO_RECOMPUTE, *, moe: bool = False) -> BlockTapes:
    """Forward and backward of one layer."""
    return layer_tapes(ctx, primitives(ctx), CostedLayerKind(moe), recompute)


def shares(op: Op) -> bool:
    """Whether an op's outputs are the memory of its first input, for the one combination of degrees."""
    return bool(np.all(op.aliases_first_input()))


def storage(ops: tuple[Op, ...]) -> dict[str, str]:
    """The tensor whose memory each name is."""
    root: dict[str, str] = {}
    for op in ops:
        for name in op.writes:
            root[name] = root.get(op.reads[0], op.reads[0]) if op.reads and shares(op) else name
    return root


def size(tape: Tape, name: str) -> float:
    return float(np.asarray(tape.tensors[name].bytes).reshape(-1)[0])


def kept(tapes: BlockTapes) -> dict[str, float]:
    """Bytes that the forward tape leaves for the backward tape, by the tensor that owns the memory. [B]"""
    root = storage(tapes.forward.ops)
    made = {w for op in tapes.forward.ops for w in op.writes} | set(tapes.forward.inputs)
    names = {root.get(r, r) for op in tapes.backward.ops if np.all(op.present) for r in op.reads if r in made}
    return {name: size(tapes.forward, name) for name in sorted(names) if size(tapes.forward, name)}


def flops(tape: Tape, suffixes: tuple[str, ...] = ()) -> float:
    """FLOPs of the matrix products, of ops with one of these endings. [FLOP]"""
    total = 0.0
    for op in tape.ops:
        if isinstance(op.work, Gemm | GroupedGemm) and (not suffixes or op.name.endswith(suffixes)):
            total += float(np.asarray(op.work.flops).reshape(-1)[0])
    return total
