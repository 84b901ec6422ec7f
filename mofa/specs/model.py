"""Facts of a model: a decoder-only transformer, described by its structure, from which parameters are counted."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mofa.specs.attention import ATTENTION_KINDS, AttentionSpec
from mofa.specs.attention.record import AttentionKind
from mofa.specs.base import Count, Positive, Spec


class MlpSpec(Spec):
    """The dense feed-forward layer, also the shape of one expert's activation function."""

    activation: Literal["swiglu", "gelu"] = "swiglu"
    ffn_hidden: Positive | None = None
    """Intermediate width of a dense layer; absent where every layer is a mixture of experts."""
    bias: bool = False


class MoeSpec(Spec):
    """Mixture of experts: routed and shared experts, which layers have them, and how the router picks."""

    num_experts: Positive
    top_k: Positive
    expert_hidden: Positive
    shared_hidden: Count = 0
    """Total intermediate width of the shared experts, 0 for none."""
    shared_gate: bool = False
    first_k_dense: Count = 0
    every: Positive = 1
    """Of the layers after the first k dense ones, every n-th is a mixture of experts."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: Positive = 1
    groups_per_token: Positive = 1
    """Experts come in groups, one a node; a token goes to at most this many groups (node-limited routing)."""
    correction_bias: bool = False
    """A per-expert bias that only steers the choice (aux-loss-free balancing); counted as a tensor."""
    router_bias: bool = False
    expert_bias: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts})")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_experts ({self.num_experts}) must be a multiple of num_groups ({self.num_groups})")
        if self.groups_per_token > self.num_groups:
            raise ValueError(
                f"groups_per_token ({self.groups_per_token}) must be at most num_groups ({self.num_groups})"
            )
        return self


class ModelSpec(Spec):
    """A decoder-only transformer language model."""

    name: str = Field(min_length=1, max_length=200)
    source: str = Field(min_length=3)
    num_layers: Annotated[int, Field(ge=1, le=10_000, strict=True)]
    hidden: Positive
    vocab: Positive
    tied_embeddings: bool = False
    attention: AttentionSpec
    mlp: MlpSpec
    moe: MoeSpec | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    positions: Literal["rope", "learned", "alibi"] = "rope"
    """``alibi`` adds a slope to the scores and has no embedding (Press et al., arXiv 2108.12409)."""
    max_positions: Positive | None = None
    """Rows of a learned position embedding; required with ``positions: learned``."""
    rope_scale: float = Field(default=1.0, ge=1.0, le=10.0)
    """Factor of cosine and sine (YaRN's attention factor, 0.1 ln s + 1 for positions stretched s times,
    arXiv 2309.00071, section 3.4). [-]"""
    embedding_norm: bool = False
    """Whether a norm follows the token embedding (BLOOM)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    num_mtp_layers: Count = 0
    """Multi-token-prediction layers (DeepSeek-V3, arXiv 2412.19437, section 2.2), counted apart."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError("positions: learned needs max_positions, the rows of the position embedding")
        if self.moe is None and self.mlp.ffn_hidden is None:
            raise ValueError("mlp.ffn_hidden is missing, and the model has no moe")
        if self.mlp.ffn_hidden is None and self.num_dense_layers:
            raise ValueError(f"mlp.ffn_hidden is missing, and {self.num_dense_layers} layers are dense")
        if self.moe is not None and self.moe.first_k_dense > self.num_layers:
            raise ValueError(
                f"moe.first_k_dense ({self.moe.first_k_dense}) must be at most num_layers ({self.num_layers})"
            )
        return self

    @property
    def attention_kind(self) -> AttentionKind[Any, Any]:
        """What its attention does: the record of its kind."""
        return ATTENTION_KINDS[self.attention.kind]

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer with this index, from 0, holds routed experts."""
        if self.moe is None or layer < self.moe.first_k_dense:
            return False
        return (layer - self.moe.first_k_dense + 1) % self.moe.every == 0

    def is_windowed_layer(self, layer: int) -> bool:
        """Whether the layer with this index, from 0, attends within a sliding window."""
        attention = self.attention
        if attention.window is None:
            return False
        return attention.window_every == 1 or layer % attention.window_every < attention.window_every - 1

    @property
    def gates_in_two_widths(self) -> bool:
        """Whether dense layers and shared experts are gated by the same function in two widths."""
        moe, mlp = self.moe, self.mlp
        if moe is None or not moe.shared_hidden or self.num_moe_layers == self.num_layers:
            return False
        return mlp.activation == "swiglu" and mlp.ffn_hidden != moe.shared_hidden

    @property
    def num_moe_layers(self) -> int:
        return 0 if self.moe is None else max(self.num_layers - self.moe.first_k_dense, 0) // self.moe.every

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_moe_layers
