"""Multi-head, grouped-query and multi-query attention: its spec and its record."""

from __future__ import annotations

from typing import Any, Literal, Protocol, Self

from pydantic import model_validator

from mofa.specs.attention.record import AttentionKind, Heads, MegatronAttentionTraits, TorchtitanAttentionTraits
from mofa.specs.base import Spec
from mofa.specs.ranges import LayerPeriod, LayerPeriodOrNone, NumHeads, Tokens, Width


class GqaSpec(Spec):
    """Multi-head, grouped-query or multi-query attention."""

    kind: Literal["gqa"] = "gqa"
    num_heads: NumHeads
    num_kv_heads: NumHeads
    head_dim: Width
    v_head_dim: Width | None = None
    """Width of a value head where it is not that of queries and keys. [elements]"""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_kind: Literal["head", "heads", "full", "unweighted"] = "head"
    """What norms of queries and keys go over and weigh with: each head with one weight for all, each head with its own
    weights (Command R+), all heads of a token at once (OLMo-2), each head without weights (Llama 4)."""
    sinks: bool = False
    """One learned logit per head that joins the softmax (gpt-oss)."""
    window: Tokens | None = None
    """Sliding-window length of the windowed layers. [tokens]"""
    window_every: LayerPeriod = 1
    """Layer i is windowed where ``i % window_every < window_every - 1`` (2: alternating), all layers where 1."""
    chunked: bool = False
    """Whether windowed layers attend within chunks of the window's length, each token to its own chunk (Llama 4)."""
    nope_every: LayerPeriodOrNone = 0
    """Every n-th layer has no rotary embedding (SmolLM3), 0 for none. [layers]"""
    rotary_dim: Width | None = None
    """Elements of a head that are turned, where not all are. [elements]"""
    softcap: bool = False
    """Whether scores go through a scaled tanh (Gemma 2, arXiv 2408.00118, section 2)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.chunked and self.window is None:
            raise ValueError("chunked: true needs window, the length of a chunk; give it")
        if self.qk_norm_kind != "head" and not self.qk_norm:
            raise ValueError(f"qk_norm_kind ({self.qk_norm_kind}) needs qk_norm: true; give it")
        if self.rotary_dim is not None and self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim ({self.rotary_dim}) must be at most head_dim ({self.head_dim})")
        return self

    @property
    def d_qk(self) -> int:
        """Width of a head of queries and keys. [elements]"""
        return self.head_dim

    @property
    def d_v(self) -> int:
        """Width of a head of values. [elements]"""
        return self.v_head_dim or self.head_dim

    @property
    def d_rope(self) -> int:
        """Part of a head that is rotated. [elements]"""
        return self.rotary_dim or self.head_dim


class GqaPrimitives(Protocol):
    """What grouped-query attention is built with: a framework's primitives for its parts."""

    def qkv(self, h: str) -> Heads:
        """Queries, keys and values of an input."""

    def norm_heads(self, q: str, k: str, over_all: bool) -> tuple[str, str]:
        """Queries and keys behind a norm over each head, or over all heads of a token at once."""

    def rotate(self, q: str, k: str) -> tuple[str, str]:
        """Queries and keys turned by their positions, as they are where positions are no rotary ones."""


def _params(attention: GqaSpec, hidden: int, norm_tensors: int) -> tuple[int, int]:
    q, k = attention.num_heads * attention.d_qk, attention.num_kv_heads * attention.d_qk
    v = attention.num_kv_heads * attention.d_v
    split = hidden * (q + k + v) + attention.num_heads * attention.d_v * hidden
    if attention.qkv_bias:
        split += q + k + v
    if attention.sinks:
        split += attention.num_heads
    if attention.qk_norm and attention.qk_norm_kind in ("heads", "full"):
        split += q + k
    shared = 2 * attention.head_dim if attention.qk_norm and attention.qk_norm_kind == "head" else 0
    return split, (hidden if attention.out_bias else 0) + shared


def _num_tensors(attention: GqaSpec, norm_tensors: int, packed: bool) -> int:
    products = 1 if packed else 3
    return (
        (products + 1)
        + attention.qkv_bias * products
        + attention.out_bias
        + attention.sinks
        + 2 * (attention.qk_norm and attention.qk_norm_kind != "unweighted")
    )


def _project(attention: GqaSpec, steps: GqaPrimitives, h: str) -> Heads:
    q, k, v = steps.qkv(h)
    if attention.qk_norm:
        q, k = steps.norm_heads(q, k, attention.qk_norm_kind == "full")
    q, k = steps.rotate(q, k)
    return q, k, v


def _megatron_config(attention: GqaSpec) -> dict[str, Any]:
    return {
        "num_attention_heads": attention.num_heads,
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
        "add_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.qk_norm,
        "qk_l2_norm": attention.qk_norm and attention.qk_norm_kind == "unweighted",
    }


def _torchtitan_model(attention: GqaSpec, experts: bool) -> str:
    return "qwen3" if experts or attention.qk_norm else "llama3"


def _torchtitan_args(attention: GqaSpec) -> dict[str, Any]:
    return {"n_heads": attention.num_heads, "n_kv_heads": attention.num_kv_heads}


GQA = AttentionKind(
    name="gqa", title="grouped-query attention", params=_params, num_tensors=_num_tensors, project=_project,
    primitives=("qkv", "head_norm", "rope"), megatron=MegatronAttentionTraits(fuses_qkv=True),
    torchtitan=TorchtitanAttentionTraits(_torchtitan_model), megatron_config=_megatron_config,
    torchtitan_args=_torchtitan_args,
    one_head_width=True,
)  # fmt: skip
