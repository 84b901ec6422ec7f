"""Facts of a model: a decoder-only transformer, described by its structure, from which parameters are counted."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from mofa.specs.attention import ATTENTION_KINDS, AttentionSpec
from mofa.specs.attention.record import AttentionKind
from mofa.specs.base import Spec
from mofa.specs.layer_kinds import LayersSpec
from mofa.specs.ranges import MAX_LAYERS as MAX_LAYERS
from mofa.specs.ranges import MAX_MTP_LAYERS, Experts, LayerPeriod, Tokens, Vocabulary, Width, WidthOrNone


class MlpSpec(Spec):
    """The dense feed-forward layer, also the shape of one expert's activation function."""

    activation: Literal["swiglu", "geglu", "gelu", "relu", "relu2"] = "swiglu"
    """``swiglu`` and ``geglu`` multiply an activated half by the other half of a product twice as wide; ``relu2`` is
    ReLU squared (So et al., arXiv 2109.08668)."""
    ffn_hidden: Width | None = None
    """Intermediate width of a dense layer; absent where every layer is a mixture of experts."""
    bias: bool = False

    @property
    def gated(self) -> bool:
        """Whether the first product has two halves, of which one gates the other.

        Examples
        --------
        >>> [MlpSpec(activation=name, ffn_hidden=8).gated for name in ("swiglu", "geglu", "gelu", "relu2")]
        [True, True, False, False]
        """
        return self.activation in ("swiglu", "geglu")


class MoeSpec(Spec):
    """Mixture of experts: routed and shared experts, which layers have them, and how the router picks."""

    num_experts: Experts
    top_k: Experts
    expert_hidden: Width
    shared_hidden: WidthOrNone = 0
    """Total intermediate width of the shared experts, 0 for none."""
    shared_gate: bool = False
    first_k_dense: Annotated[int, Field(ge=0, le=MAX_LAYERS, strict=True)] = 0
    every: LayerPeriod = 1
    """Of the layers after the first k dense ones, every n-th is a mixture of experts."""
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Of the router; ``sqrtsoftplus`` is the root of softplus (DeepSeek-V4), in models with ``layers`` alone."""
    num_groups: Experts = 1
    groups_per_token: Experts = 1
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


_OF_LAYERS = (
    "norm_bias", "norm_placement", "parallel_branches", "shared_branch_norm", "head_bias", "logit_softcap",
    "multipliers",
)  # fmt: skip
_OF_ATTENTION = ("qk_norm_kind", "chunked", "nope_every", "rotary_dim", "softcap")


class ModelSpec(Spec):
    """A decoder-only transformer language model."""

    name: str = Field(min_length=1, max_length=200)
    source: str = Field(min_length=3)
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS, strict=True)]
    hidden: Width
    vocab: Vocabulary
    tied_embeddings: bool = False
    attention: AttentionSpec
    mlp: MlpSpec
    moe: MoeSpec | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: bool = True
    """Whether LayerNorms have a bias beside their weight; an RMSNorm has none."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Where attention and feed-forward have their norms: in front of them, behind them and ahead of the residual sum
    (OLMo-2), or both (Gemma 2)."""
    parallel_branches: bool = False
    """Whether attention and feed-forward read one residual stream and are added to it at once (GPT-J)."""
    shared_branch_norm: bool = False
    """Whether parallel branches read one norm's output, and do not have one each."""
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    """``alibi`` adds a slope to the scores and has no embedding (Press et al., arXiv 2108.12409)."""
    max_positions: Tokens | None = None
    """Rows of a learned position embedding; required with ``positions: learned``."""
    rope_scale: float = Field(default=1.0, ge=1.0, le=10.0)
    """Factor of cosine and sine (YaRN's attention factor, 0.1 ln s + 1 for positions stretched s times,
    arXiv 2309.00071, section 3.4). [-]"""
    embedding_norm: bool = False
    """Whether a norm follows the token embedding (BLOOM)."""
    head_bias: bool = False
    """Whether the output layer has a bias, of one number a token of the vocabulary."""
    logit_softcap: bool = False
    """Whether logits go through a scaled tanh (Gemma 2, arXiv 2408.00118, section 2)."""
    multipliers: tuple[Literal["embedding", "branches", "logits"], ...] = ()
    """What is multiplied by a constant in an op of its own: embedded tokens, the results of attention and feed-forward,
    logits (Granite 3). Factors of the scores are part of attention's own scale."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    num_mtp_layers: Annotated[int, Field(ge=0, le=MAX_MTP_LAYERS, strict=True)] = 0
    """Multi-token-prediction layers (DeepSeek-V3, arXiv 2412.19437, section 2.2), counted apart."""
    layers: LayersSpec | None = None
    """What layers hold where they are of several kinds, or hold more than ``attention`` and ``mlp`` or ``moe``. Their
    parameters and states are counted; a step of them is not modelled yet."""

    @model_serializer(mode="wrap")
    def _without_absent_layers(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.layers is None:
            fields.pop("layers", None)
        return fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.norm_bias and self.norm == "rmsnorm":
            raise ValueError("norm_bias: false needs norm: layernorm, as an RMSNorm has none; leave it out")
        if self.shared_branch_norm and not self.parallel_branches:
            raise ValueError("shared_branch_norm: true needs parallel_branches: true; leave it out")
        if self.parallel_branches and self.norm_placement != "before":
            raise ValueError(
                f"norm_placement ({self.norm_placement}): parallel branches have their norms before; leave it out"
            )
        if len(set(self.multipliers)) != len(self.multipliers):
            raise ValueError(f"multipliers ({', '.join(self.multipliers)}) names one twice; leave it out")
        if self.attention.nope_every and self.positions != "rope":
            raise ValueError(f"attention.nope_every needs positions: rope, not {self.positions}; leave it out")
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError("positions: learned needs max_positions, the rows of the position embedding")
        if self.layers is not None:
            self._check_layers(self.layers)
            return self
        if self.moe is not None and self.moe.score == "sqrtsoftplus":
            raise ValueError("moe.score (sqrtsoftplus) is of models with layers; use softmax or sigmoid")
        if self.moe is None and self.mlp.ffn_hidden is None:
            raise ValueError("mlp.ffn_hidden is missing, and the model has no moe")
        if self.mlp.ffn_hidden is None and self.num_dense_layers:
            raise ValueError(f"mlp.ffn_hidden is missing, and {self.num_dense_layers} layers are dense")
        if self.moe is not None and self.moe.first_k_dense > self.num_layers:
            raise ValueError(
                f"moe.first_k_dense ({self.moe.first_k_dense}) must be at most num_layers ({self.num_layers})"
            )
        return self

    def _check_layers(self, layers: LayersSpec) -> None:
        ffns = [ffn for kind in layers.kinds for ffn in kind.ffns]
        names = len(layers.pattern)
        if self.num_layers % names:
            raise ValueError(
                f"num_layers ({self.num_layers}) must be a multiple of the {names} names in layers.pattern"
            )
        if self.moe is None and any(ffn.has_experts for ffn in ffns):
            raise ValueError("moe is missing, and a kind of layers has it")
        if self.moe is not None and (self.moe.first_k_dense or self.moe.every != 1):
            raise ValueError("moe.first_k_dense and moe.every: layers.pattern says where experts are; leave them out")
        if self.mlp.ffn_hidden is None and any(ffn.kind == "mlp" and ffn.ffn_hidden is None for ffn in ffns):
            raise ValueError("mlp.ffn_hidden is missing, and a kind of layers has mlp")

    @property
    def attention_kind(self) -> AttentionKind[Any, Any]:
        """What its attention does: the record of its kind."""
        return ATTENTION_KINDS[self.attention.kind]

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer with this index, from 0, holds routed experts."""
        if self.layers is not None:
            return self.layers.kind_of(layer).num_experts_ffns > 0
        if self.moe is None or layer < self.moe.first_k_dense:
            return False
        return (layer - self.moe.first_k_dense + 1) % self.moe.every == 0

    def is_windowed_layer(self, layer: int) -> bool:
        """Whether the layer with this index, from 0, attends within a sliding window."""
        attention = self.attention
        if attention.window is None:
            return False
        return attention.window_every == 1 or layer % attention.window_every < attention.window_every - 1

    def is_rotated_layer(self, layer: int) -> bool:
        """Whether queries and keys of the layer with this index, from 0, are turned by their positions."""
        if self.positions != "rope":
            return False
        every = self.attention.nope_every
        return not every or (layer + 1) % every != 0

    @property
    def uncommon_facts(self) -> tuple[str, ...]:
        """Facts of its layers and head that a Llama does not have, by their names in a file, sizes aside.

        Examples
        --------
        >>> from mofa.specs.load import load_workload
        >>> llama = load_workload("llama3-8b").model
        >>> llama.uncommon_facts, llama.model_copy(update={"logit_softcap": True}).uncommon_facts
        ((), ('logit_softcap',))
        """
        own = [name for name in _OF_LAYERS if getattr(self, name) != type(self).model_fields[name].default]
        fields = type(self.attention).model_fields
        other = [
            name for name in _OF_ATTENTION if name in fields and getattr(self.attention, name) != fields[name].default
        ]
        if self.attention_kind.one_head_width and self.attention.d_v != self.attention.d_qk:
            other.append("v_head_dim")
        return (*own, *(f"attention.{name}" for name in other))

    def attended_pairs(self, seq_len: int, windowed: bool) -> float:
        """Query-key pairs of one head and sequence under the causal mask, within a windowed layer's windows. [pairs]

        Examples
        --------
        >>> from mofa.specs.load import load_workload
        >>> load_workload("llama3-8b").model.attended_pairs(4, windowed=False)
        10.0
        """
        s, window = float(seq_len), self.attention.window if windowed else None
        if window is None or window >= s:
            return s * (s + 1) / 2
        if self.attention.chunked:
            rest = s % window
            return s // window * (window * (window + 1) / 2) + rest * (rest + 1) / 2
        return window * (window + 1) / 2 + (s - window) * window

    @property
    def norms_per_layer(self) -> int:
        """Norms over the hidden width in one layer, 1, 2 or 4."""
        if self.norm_placement == "both":
            return 4
        return 1 if self.shared_branch_norm else 2

    @property
    def tensors_per_norm(self) -> int:
        """Parameter tensors of a norm over the hidden width: its weight and, of a LayerNorm, its bias. [tensors]"""
        return 2 if self.norm == "layernorm" and self.norm_bias else 1

    @property
    def gates_in_two_widths(self) -> bool:
        """Whether dense layers and shared experts are gated by the same function in two widths."""
        moe, mlp = self.moe, self.mlp
        if moe is None or not moe.shared_hidden or self.num_moe_layers == self.num_layers:
            return False
        return mlp.gated and mlp.ffn_hidden != moe.shared_hidden

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        if self.layers is not None:
            return sum(self.is_moe_layer(layer) for layer in range(self.num_layers))
        return 0 if self.moe is None else max(self.num_layers - self.moe.first_k_dense, 0) // self.moe.every

    @property
    def num_dense_layers(self) -> int:
        """Layers without experts."""
        return self.num_layers - self.num_moe_layers
