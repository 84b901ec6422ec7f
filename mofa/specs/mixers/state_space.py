"""State spaces: Mamba of the first and of the second version, and Griffin's gated linear recurrence."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from mofa.specs.attention import AttentionSpec
from mofa.specs.base import Spec
from mofa.specs.ranges import NumHeads, Width


class Mamba1Spec(Spec):
    """A selective state space (Mamba, Gu and Dao, arXiv 2312.00752, section 3.4).

    References
    ----------
    Hugging Face transformers 5.24, ``models/jamba/modeling_jamba.py``, ``JambaMambaMixer``.
    """

    title: ClassVar[str] = "Mamba"
    refused_as: ClassVar[str] = "linear attention"

    kind: Literal["mamba1"] = "mamba1"
    inner: Width
    """Width inside, usually twice the hidden width. [elements]"""
    state_dim: Width
    """State of each inner element. [elements]"""
    dt_rank: Width
    """Rank of the projection of the time step. [elements]"""
    conv_kernel: Width
    """Length of the causal convolution. [tokens]"""
    conv_bias: bool = True
    proj_bias: bool = False
    norms: bool = False
    """Whether time step, input and output matrices have RMSNorms of their own (Jamba)."""

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's mixer without the norm in front. [params]"""
        projections = hidden * 2 * self.inner + self.inner * hidden
        projections += self.inner * (self.dt_rank + 2 * self.state_dim) + (self.dt_rank + 1) * self.inner
        if self.proj_bias:
            projections += 2 * self.inner + hidden
        norms = self.dt_rank + 2 * self.state_dim if self.norms else 0
        return projections + self.inner * (self.conv_kernel + self.conv_bias + self.state_dim + 1) + norms

    @property
    def state_elements(self) -> int:
        """Recurrent state of one layer and sequence. [elements]"""
        return self.inner * self.state_dim

    @property
    def conv_state_elements(self) -> int:
        """Inputs that the convolution remembers of one layer and sequence. [elements]"""
        return self.inner * (self.conv_kernel - 1)


class Mamba2Spec(Spec):
    """A selective state space with a scalar decay a head (Mamba-2, Dao and Gu, arXiv 2405.21060, section 7.1).

    References
    ----------
    Hugging Face transformers 5.24, ``models/mamba2/modeling_mamba2.py``, ``Mamba2Mixer``.
    """

    title: ClassVar[str] = "Mamba-2"
    refused_as: ClassVar[str] = "linear attention"

    kind: Literal["mamba2"] = "mamba2"
    num_heads: NumHeads
    head_dim: Width
    """Inner elements of a head. [elements]"""
    state_dim: Width
    """State of each inner element. [elements]"""
    num_groups: NumHeads
    """Groups of heads that share input and output matrices. [-]"""
    conv_kernel: Width
    """Length of the causal convolution. [tokens]"""
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    gated_norm: bool = True
    """Whether a gated RMSNorm stands in front of the output projection."""

    @property
    def inner_width(self) -> int:
        """Width inside. [elements]"""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution. [elements]"""
        return self.inner_width + 2 * self.num_groups * self.state_dim

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's mixer without the norm in front. [params]"""
        columns = self.inner_width + self.conv_width + self.num_heads
        projections = columns * (hidden + self.proj_bias) + self.inner_width * hidden + hidden * self.out_bias
        convolution = self.conv_width * (self.conv_kernel + self.conv_bias)
        return projections + convolution + 3 * self.num_heads + (self.inner_width if self.gated_norm else 0)

    @property
    def state_elements(self) -> int:
        """Recurrent state of one layer and sequence. [elements]"""
        return self.inner_width * self.state_dim

    @property
    def conv_state_elements(self) -> int:
        """Inputs that the convolution remembers of one layer and sequence. [elements]"""
        return self.conv_width * (self.conv_kernel - 1)


class GatedRecurrentUnitSpec(Spec):
    """A gated linear recurrence, the real-gated linear recurrent unit (Griffin, arXiv 2402.19427, section 2.4).

    References
    ----------
    Hugging Face transformers 5.24, ``models/recurrent_gemma/modeling_recurrent_gemma.py``,
    ``RecurrentGemmaRecurrentBlock``.
    """

    title: ClassVar[str] = "RG-LRU"
    refused_as: ClassVar[str] = "linear attention"

    kind: Literal["rg_lru"] = "rg_lru"
    inner: Width
    """Width of the recurrence. [elements]"""
    num_blocks: NumHeads
    """Blocks of the gates' block-diagonal products. [-]"""
    conv_kernel: Width
    """Length of the causal convolution. [tokens]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.inner % self.num_blocks:
            raise ValueError(f"inner ({self.inner}) must be a multiple of num_blocks ({self.num_blocks})")
        return self

    def params(self, attention: AttentionSpec, hidden: int) -> int:
        """Parameters of one layer's mixer without the norm in front. [params]

        Two products into the inner width and one back, all with biases; a convolution with a bias; gates of input and
        recurrence, a block a head with biases; and a decay an element.
        """
        projections = 2 * (hidden + 1) * self.inner + (self.inner + 1) * hidden
        gates = 2 * self.inner * (self.inner // self.num_blocks + 1)
        return projections + self.inner * (self.conv_kernel + 1) + gates + self.inner

    @property
    def state_elements(self) -> int:
        """Recurrent state of one layer and sequence. [elements]"""
        return self.inner

    @property
    def conv_state_elements(self) -> int:
        """Inputs that the convolution remembers of one layer and sequence. [elements]"""
        return self.inner * (self.conv_kernel - 1)
