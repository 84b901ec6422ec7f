"""The record of an attention kind: all that other rooms may ask about it beside its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

Sizes = TypeVar("Sizes")
"""The kind's spec: what a model's file writes under ``attention``."""
Steps = TypeVar("Steps")
"""Which of a framework's primitives it is built with."""
Heads = tuple[str, str, str]
"""Names of the tensors that hold queries, keys and values."""


class LowRankWidth(NamedTuple):
    """The width of a product that has no heads. [elements]"""

    name: str
    elements: int
    is_input: bool
    """Whether a product also reads rows of this width."""


@dataclass(frozen=True)
class MegatronAttentionTraits:
    """What Megatron-Core's layers do with an attention kind."""

    fuses_qkv: bool
    """Queries, keys and values are parts of one product, and values a strided view of it."""
    norm_is_module: bool = False
    """The norm in front is a module of its own in Transformer Engine, and no part of the first product."""
    has_flash: bool = True
    """FlashAttention is modelled under Transformer Engine."""
    has_unfused: bool = True
    """Megatron-Core's attention by separate products takes its heads."""
    has_eager_rotation: bool = True
    """Rotary embeddings without a fused kernel are modelled under Transformer Engine."""
    has_biases: bool = True
    """Its linear layers can have biases."""
    needs_rotation: bool = False
    """It has no other positions than rotary ones."""
    has_latents: bool = False
    """It is Megatron's multi-latent attention, with arguments and a configuration class of its own."""
    rotates_by_yarn: bool = False
    """Rotations are YaRN's, of which each layer keeps tables of its own."""


@dataclass(frozen=True)
class TorchtitanAttentionTraits:
    """What torchtitan's models do with an attention kind."""

    model: Callable[[Any, bool], str]
    """Name of the model that has it, from its spec and whether there are experts."""
    has_local_heads: bool = True
    """Without norms over heads, queries, keys and values leave their linears as local tensors."""
    keeps_exchanges: bool = False
    """Without sinks, recomputation by op keeps the outputs of its model's all-to-alls."""
    registers_norms_first: bool = False
    """A block registers its norms ahead of its MLP or experts."""
    views_of_rotation: float = 7.0
    """Ops without a kernel around the rotation of distributed heads, counted by a mode that sees every op. [-]"""


def _no_widths(sizes: Any) -> tuple[LowRankWidth, ...]:
    return ()


def _no_columns(sizes: Any) -> int:
    return 0


@dataclass(frozen=True, eq=False)
class AttentionKind(Generic[Sizes, Steps]):
    """What a kind of attention is made of and does, whatever the plan.

    A kind's file has its spec and ends with its record; ``mofa.specs.attention.ATTENTION_KINDS`` is the list of them.
    The spec has ``num_heads``, ``num_kv_heads`` and the sizes of a head that kernels see: ``d_qk``, ``d_v``, and
    ``d_rope``, the part that is rotated. It also has ``window``, ``window_every``, ``chunked``, ``nope_every``,
    ``sinks``, ``softcap``, ``qkv_bias``, ``out_bias``, ``qk_norm`` and ``qk_norm_kind``; options that the kind never
    has are class variables of the empty value.
    """

    name: str
    """The ``kind`` in a model's file."""
    title: str
    """Its name in sentences."""
    params: Callable[[Sizes, int, int], tuple[int, int]]
    """Parameters without the norm in front, from the spec, hidden width and tensors of a norm.

    Those that tensor parallelism splits, and those that each of its ranks has whole. [params]
    """
    num_tensors: Callable[[Sizes, int, bool], int]
    """Tensors of these, from the spec, tensors of a norm, and whether products of one input are packed. [tensors]"""
    project: Callable[[Sizes, Steps, str], Heads]
    """Appends the ops that make queries, keys and values of a normalised input."""
    primitives: tuple[str, ...]
    """Fields of :class:`mofa.blocks.context.Primitives` that this calls: a framework without them lacks the kind."""
    megatron: MegatronAttentionTraits
    torchtitan: TorchtitanAttentionTraits
    megatron_config: Callable[[Sizes], dict[str, Any]]
    """Fields of Megatron-Core's configuration about it."""
    torchtitan_args: Callable[[Sizes], dict[str, Any]]
    """Arguments of torchtitan's model about it."""
    one_head_width: bool = False
    """Heads of values are as wide as those of queries, unless its spec says otherwise."""
    recompute_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules of Megatron-Core that recomputation may name for it alone, by the regions whose outputs it discards."""
    low_rank_widths: Callable[[Sizes], tuple[LowRankWidth, ...]] = _no_widths
    """Widths of its products that have no heads."""
    gathered_width: Callable[[Sizes], int] = _no_columns
    """Widest low-rank input that a column-parallel product gathers, 0 where all have the hidden width. [elements]"""
    shared_columns: Callable[[Sizes], int] = _no_columns
    """Columns of the product whose output all heads share, 0 without one. [elements]"""
