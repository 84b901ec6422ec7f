"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): its spec and its record."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

from mofa.specs.attention.record import (
    AttentionKind,
    Heads,
    LowRankWidth,
    MegatronAttentionTraits,
    TorchtitanAttentionTraits,
)
from mofa.specs.base import Spec
from mofa.specs.ranges import NumHeads, Width


class MlaSpec(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    qkv_bias: ClassVar[bool] = False
    out_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    qk_norm_kind: ClassVar[str] = "head"
    sinks: ClassVar[bool] = False
    window: ClassVar[None] = None
    window_every: ClassVar[int] = 1
    chunked: ClassVar[bool] = False
    nope_every: ClassVar[int] = 0
    softcap: ClassVar[bool] = False

    kind: Literal["mla"] = "mla"
    num_heads: NumHeads
    q_lora_rank: Width | None = None
    kv_lora_rank: Width
    qk_nope_head_dim: Width
    qk_rope_head_dim: Width
    v_head_dim: Width

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads: as many as query heads, once projected up."""
        return self.num_heads

    @property
    def d_qk(self) -> int:
        """Width of a head of queries and keys, with its rotated part. [elements]"""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def d_v(self) -> int:
        """Width of a head of values. [elements]"""
        return self.v_head_dim

    @property
    def d_rope(self) -> int:
        """Rotated part of a head, which keys share. [elements]"""
        return self.qk_rope_head_dim


class MlaPrimitives(Protocol):
    """What latent attention is built with: a framework's primitive for its projections."""

    def mla(self, attention: MlaSpec, h: str) -> Heads:
        """Queries, keys and values by low-rank projections of an input, rotated."""


def _params(attention: MlaSpec, hidden: int, norm_tensors: int) -> tuple[int, int]:
    heads = attention.num_heads
    split = (
        attention.kv_lora_rank * heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        + heads * attention.v_head_dim * hidden
    )
    replicated = hidden * (attention.kv_lora_rank + attention.qk_rope_head_dim) + norm_tensors * attention.kv_lora_rank
    if attention.q_lora_rank is None:
        return split + hidden * heads * attention.d_qk, replicated
    split += attention.q_lora_rank * heads * attention.d_qk
    return split, replicated + hidden * attention.q_lora_rank + norm_tensors * attention.q_lora_rank


def _num_tensors(attention: MlaSpec, norm_tensors: int, packed: bool) -> int:
    return 4 + norm_tensors + (1 + norm_tensors if attention.q_lora_rank is not None else 0)


def _project(attention: MlaSpec, steps: MlaPrimitives, h: str) -> Heads:
    return steps.mla(attention, h)


def _megatron_config(attention: MlaSpec) -> dict[str, Any]:
    """With a norm behind each compression, as DeepSeek has it, and its YaRN."""
    return {
        "multi_latent_attention": True,
        "num_attention_heads": attention.num_heads,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_head_dim": attention.qk_nope_head_dim,
        "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "rope_type": "yarn",
        "qk_layernorm": True,
    }


def _torchtitan_model(attention: MlaSpec, experts: bool) -> str:
    return "deepseek_v3"


def _torchtitan_args(attention: MlaSpec) -> dict[str, Any]:
    return {
        "n_heads": attention.num_heads,
        "q_lora_rank": attention.q_lora_rank or 0,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "attn_type": "sdpa",
    }


def _low_rank_widths(attention: MlaSpec) -> tuple[LowRankWidth, ...]:
    queries = (
        () if attention.q_lora_rank is None else (LowRankWidth("q_lora_rank", attention.q_lora_rank, is_input=True),)
    )
    return (
        *queries,
        LowRankWidth("kv_lora_rank", attention.kv_lora_rank, is_input=True),
        LowRankWidth("kv_lora_rank + qk_rope_head_dim", _shared_columns(attention), is_input=False),
    )


def _gathered_width(attention: MlaSpec) -> int:
    return attention.q_lora_rank or 0


def _shared_columns(attention: MlaSpec) -> int:
    """The latent of keys and values, and the one rotated key."""
    return attention.kv_lora_rank + attention.qk_rope_head_dim


MLA = AttentionKind(
    name="mla", title="latent attention", params=_params, num_tensors=_num_tensors, project=_project,
    primitives=("mla",),
    megatron=MegatronAttentionTraits(
        fuses_qkv=False, norm_is_module=True, has_flash=False, has_unfused=False, has_eager_rotation=False,
        has_biases=False, needs_rotation=True, has_latents=True, rotates_by_yarn=True,
    ),
    torchtitan=TorchtitanAttentionTraits(
        _torchtitan_model, has_local_heads=False, keeps_exchanges=True, registers_norms_first=True,
        views_of_rotation=8.0,
    ),
    megatron_config=_megatron_config, torchtitan_args=_torchtitan_args,
    recompute_modules={"mla_up_proj": ("mla_up",)}, low_rank_widths=_low_rank_widths, gathered_width=_gathered_width,
    shared_columns=_shared_columns,
)  # fmt: skip
