"""Softmax attention: the model's, one of another shape, and those with indexers, compressed keys or output gates.

But for that of another shape, they take their heads from the model's ``attention`` and say what they have besides.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from mofa.specs.attention import ATTENTION_KINDS, AttentionSpec
from mofa.specs.attention.gqa import GqaSpec
from mofa.specs.base import Spec
from mofa.specs.ranges import NumHeads, Tokens, Width


def attention_params(attention: AttentionSpec, hidden: int) -> int:
    """Parameters of an attention of a kind with a record, its own norms being RMSNorms. [params]"""
    return sum(ATTENTION_KINDS[attention.kind].params(attention, hidden, 1))


class ModelAttentionSpec(Spec):
    """The model's attention as it is."""

    title: ClassVar[str] = "attention"
    refused_as: ClassVar[str] = ""
    state_elements: ClassVar[int] = 0
    conv_state_elements: ClassVar[int] = 0

    kind: Literal["attention"] = "attention"

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's attention without the norm in front. [params]"""
        return attention_params(attention, hidden)


class OtherAttentionSpec(Spec):
    """An attention of another shape than the model's, as in the windowed layers of MiMo-V2-Flash."""

    title: ClassVar[str] = "attention of another shape"
    refused_as: ClassVar[str] = "attention of several shapes"
    state_elements: ClassVar[int] = 0
    conv_state_elements: ClassVar[int] = 0

    kind: Literal["other_attention"] = "other_attention"
    shape: GqaSpec

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's attention without the norm in front. [params]"""
        return attention_params(self.shape, hidden)


class IndexerSpec(Spec):
    """Heads that choose which tokens each query attends to (DeepSeek sparse attention)."""

    num_heads: NumHeads
    head_dim: Width
    top_k: Tokens
    """Tokens, or blocks of compressed tokens, that a query attends to. [tokens]"""


class SparseAttentionSpec(IndexerSpec):
    """The model's latent attention over tokens that an indexer chooses (DeepSeek-V3.2-Exp, section 1).

    References
    ----------
    Hugging Face transformers 5.24, ``models/deepseek_v32/modeling_deepseek_v32.py``, ``DeepseekV32Indexer``.
    """

    title: ClassVar[str] = "attention with an indexer"
    refused_as: ClassVar[str] = "sparse attention"
    state_elements: ClassVar[int] = 0
    conv_state_elements: ClassVar[int] = 0

    kind: Literal["sparse"] = "sparse"

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's attention and indexer without the norm in front. [params]

        The indexer's queries are projected from the latent of the queries; its one key has a LayerNorm with a bias.
        """
        rank = getattr(attention, "q_lora_rank", None) or hidden
        queries = rank * self.num_heads * self.head_dim
        keys = hidden * self.head_dim + 2 * self.head_dim
        return attention_params(attention, hidden) + queries + keys + hidden * self.num_heads


class CompressedAttentionSpec(Spec):
    """Attention over a window and compressed earlier tokens, one head of keys that are also the values (DeepSeek-V4).

    Queries and the output are projected by low ranks, the output in groups of heads. Each ``ratio`` tokens become one
    by a gated sum, overlapping where keys and gates come in two halves.

    References
    ----------
    Hugging Face transformers 5.24, ``models/deepseek_v4/modeling_deepseek_v4.py``.
    """

    title: ClassVar[str] = "attention over compressed tokens"
    refused_as: ClassVar[str] = "sparse attention"
    state_elements: ClassVar[int] = 0
    conv_state_elements: ClassVar[int] = 0

    kind: Literal["compressed"] = "compressed"
    q_lora_rank: Width
    o_lora_rank: Width
    """Rank of the output's projection, in each group. [elements]"""
    o_groups: NumHeads
    """Groups of heads, each with an output projection of its own. [-]"""
    ratio: Tokens | None = None
    """Tokens that become one; absent in layers that have the window alone. [tokens]"""
    overlap: bool = False
    """Whether each compressed token also sees the ``ratio`` tokens before its own."""
    indexer: IndexerSpec | None = None
    """What chooses compressed tokens; absent where queries attend to all of them."""

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's attention without the norm in front. [params]"""
        heads, width = attention.num_heads, attention.d_qk
        queries = hidden * self.q_lora_rank + self.q_lora_rank * (1 + heads * width)
        keys = hidden * width + width
        output = heads * width * self.o_lora_rank + self.o_groups * self.o_lora_rank * hidden
        total = queries + keys + output + (heads if attention.sinks else 0)
        if self.ratio is not None:
            total += self._compressor(width, hidden, self.ratio)
            if self.indexer is not None:
                index = self.indexer
                total += self._compressor(index.head_dim, hidden, self.ratio)
                total += self.q_lora_rank * index.num_heads * index.head_dim + hidden * index.num_heads
        return total

    def _compressor(self, width: int, hidden: int, ratio: int) -> int:
        """Keys, gates, a bias of each place in a block and a norm. [params]"""
        columns = (2 if self.overlap else 1) * width
        return 2 * hidden * columns + ratio * columns + width


class FactorizedAttentionSpec(Spec):
    """Multi-matrix factorized attention: queries of all heads from one low-rank query (Step-3, arXiv 2507.19427,
    section 3).

    References
    ----------
    vLLM 0.10, ``vllm/model_executor/models/step3_text.py``, ``Step3TextAttention``.
    """

    title: ClassVar[str] = "multi-matrix factorized attention"
    refused_as: ClassVar[str] = "multi-matrix factorized attention"
    state_elements: ClassVar[int] = 0
    conv_state_elements: ClassVar[int] = 0

    kind: Literal["factorized"] = "factorized"
    q_rank: Width
    """Width of the query that heads share, behind which is a norm. [elements]"""

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's attention without the norm in front. [params]"""
        heads = attention.num_heads
        queries = hidden * self.q_rank + self.q_rank + self.q_rank * heads * attention.d_qk
        keys_values = hidden * attention.num_kv_heads * (attention.d_qk + attention.d_v)
        return queries + keys_values + heads * attention.d_v * hidden


class GatedAttentionSpec(Spec):
    """The model's attention, whose output each head multiplies by a gate of the same width (Qwen3-Next).

    References
    ----------
    Qiu et al., arXiv 2505.06708; Hugging Face transformers 5.24, ``models/qwen3_next``, ``Qwen3NextAttention``.
    """

    title: ClassVar[str] = "attention with an output gate"
    refused_as: ClassVar[str] = "attention with an output gate"
    state_elements: ClassVar[int] = 0
    conv_state_elements: ClassVar[int] = 0

    kind: Literal["gated"] = "gated"

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's attention without the norm in front. [params]"""
        gate = attention.num_heads * attention.d_v
        return attention_params(attention, hidden) + (hidden + attention.qkv_bias) * gate
