"""Linear attention: delta rules with gates, and lightning attention."""

from __future__ import annotations

from typing import ClassVar, Literal

from mofa.specs.attention import AttentionSpec
from mofa.specs.base import Spec
from mofa.specs.ranges import NumHeads, Width


class GatedDeltaNetSpec(Spec):
    """Linear attention by the delta rule with a decay a head (Yang et al., arXiv 2412.06464, section 3).

    References
    ----------
    Hugging Face transformers 5.24, ``models/qwen3_next/modeling_qwen3_next.py``, ``Qwen3NextGatedDeltaNet``.
    """

    title: ClassVar[str] = "gated delta net"
    refused_as: ClassVar[str] = "linear attention"

    kind: Literal["gated_delta_net"] = "gated_delta_net"
    num_key_heads: NumHeads
    num_value_heads: NumHeads
    key_head_dim: Width
    value_head_dim: Width
    conv_kernel: Width
    """Length of the causal convolution. [tokens]"""

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values. [elements]"""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's mixer without the norm in front. [params]

        Beside queries, keys and values: an output gate as wide as values, two rates a value head, a time step's bias
        and a decay a value head, and a norm over a value head.
        """
        values = self.num_value_heads * self.value_head_dim
        projections = hidden * (self.conv_width + values + 2 * self.num_value_heads) + values * hidden
        return projections + self.conv_width * self.conv_kernel + 2 * self.num_value_heads + self.value_head_dim

    @property
    def state_elements(self) -> int:
        """Recurrent state of one layer and sequence. [elements]"""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim

    @property
    def conv_state_elements(self) -> int:
        """Inputs that the convolution remembers of one layer and sequence. [elements]"""
        return self.conv_width * (self.conv_kernel - 1)


class KimiDeltaSpec(Spec):
    """Kimi delta attention: the delta rule with a decay a channel (Kimi Linear, arXiv 2510.26692, section 3).

    References
    ----------
    Hugging Face transformers 5.24, ``models/kimi_linear/modeling_kimi_linear.py``, ``KimiLinearDeltaAttention``.
    """

    title: ClassVar[str] = "Kimi delta attention"
    refused_as: ClassVar[str] = "linear attention"

    kind: Literal["kimi_delta"] = "kimi_delta"
    num_heads: NumHeads
    head_dim: Width
    conv_kernel: Width
    """Length of the causal convolutions. [tokens]"""

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's mixer without the norm in front. [params]

        Decays and the output gate are projections of rank ``head_dim``, and decays have a bias a channel. There is one
        rate and one decay a head, and a norm over a head.
        """
        width, rank = self.num_heads * self.head_dim, self.head_dim
        projections = 3 * hidden * width + width * hidden + hidden * self.num_heads
        gates = 2 * (hidden * rank + rank * width) + width + self.num_heads
        return projections + gates + 3 * width * self.conv_kernel + self.head_dim

    @property
    def state_elements(self) -> int:
        """Recurrent state of one layer and sequence. [elements]"""
        return self.num_heads * self.head_dim * self.head_dim

    @property
    def conv_state_elements(self) -> int:
        """Inputs that the convolutions remember of one layer and sequence. [elements]"""
        return 3 * self.num_heads * self.head_dim * (self.conv_kernel - 1)


class LightningSpec(Spec):
    """Lightning attention: linear attention with a fixed decay a head (MiniMax-01, arXiv 2501.08313, section 2.2).

    References
    ----------
    Hugging Face transformers 5.24, ``models/minimax/modeling_minimax.py``, ``MiniMaxLightningAttention``.
    """

    title: ClassVar[str] = "lightning attention"
    refused_as: ClassVar[str] = "linear attention"
    conv_state_elements: ClassVar[int] = 0

    kind: Literal["lightning"] = "lightning"
    num_heads: NumHeads
    head_dim: Width

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's mixer without the norm in front: q, k, v, gate, output and a norm. [params]"""
        width = self.num_heads * self.head_dim
        return 5 * hidden * width + width

    @property
    def state_elements(self) -> int:
        """Recurrent state of one layer and sequence. [elements]"""
        return self.num_heads * self.head_dim * self.head_dim
