"""Facts of a training job: a model, its batch, tokens and numerics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mofa.specs.base import Spec
from mofa.specs.model import ModelSpec
from mofa.specs.optimizers import OPTIMIZERS, Implementation, OptimizerName, OptimizerTraits
from mofa.specs.ranges import MOST_TOKENS, Sequences
from mofa.specs.ranges import Tokens as SequenceLength
from mofa.specs.routing import RoutingSpec
from mofa.units import Tokens


class BatchSpec(Spec):
    """What one optimizer step consumes."""

    seq_len: SequenceLength
    global_batch: Sequences
    """Sequences per optimizer step."""


Products = Literal[
    "bf16", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "fp8-mxfp8", "fp8-rowwise", "fp8-rowwise-gw-hp", "fp8",
]  # fmt: skip
FP8_RECIPES = (
    "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "fp8-mxfp8", "fp8-rowwise", "fp8-rowwise-gw-hp",
)  # fmt: skip
OLD_FP8 = "fp8"
"""The spelling of before recipes were told apart. It is read as delayed scaling: that is Megatron-Core's own default
(``fp8_recipe``, transformer_config.py), and what the spelling stood for, casts that look for the largest as they go."""


class PrecisionSpec(Spec):
    """Number formats that are part of the training recipe; the search never changes them by itself."""

    gemm: Products = "bf16"
    """Format of the layers' matrix products. fp8 comes with how it is scaled: by a tensor's largest of earlier steps
    (``fp8-delayed``), its largest now (``fp8-tensorwise``), blocks of 1 x 128, of weights 128 x 128
    (``fp8-blockwise``), or blocks of 1 x 32 with a scale of a byte, which Blackwell multiplies as they are
    (``fp8-mxfp8``). torchtitan's linears are scaled by torchao: by a tensor's largest now, by the largest of each row
    or column (``fp8-rowwise``), or by that with weights' gradients in bf16 (``fp8-rowwise-gw-hp``)."""
    params: Literal["bf16", "fp32"] | None = None
    """Format of the parameters that the framework holds; its own default where absent."""
    moments: Literal["fp32", "bf16"] = "fp32"

    @property
    def fp8_recipe(self) -> str:
        """How fp8 products are scaled: ``delayed``, ``tensorwise``, ``blockwise``, ``mxfp8``, ``rowwise`` or
        ``rowwise-gw-hp``; empty without fp8.

        Examples
        --------
        >>> [PrecisionSpec(gemm=gemm).fp8_recipe for gemm in ("bf16", "fp8-blockwise", "fp8")]
        ['', 'blockwise', 'delayed']
        """
        return "delayed" if self.gemm == OLD_FP8 else self.gemm.partition("-")[2]

    @property
    def peak_format(self) -> Literal["bf16", "fp8"]:
        """The format whose peak rate the products can reach."""
        return "fp8" if self.fp8_recipe else "bf16"


class OptimizerSpec(Spec):
    """The optimizer and what it does besides."""

    name: OptimizerName = "adamw"
    clip_grad_norm: bool = True
    implementation: Implementation | None = None
    """Which kernels update the weights; the framework's default where absent."""

    @property
    def traits(self) -> OptimizerTraits:
        """What it holds."""
        return OPTIMIZERS[self.name]


class WorkloadSpec(Spec):
    """One training job."""

    name: str = Field(min_length=1, max_length=200)
    source: str = Field(min_length=3)
    model: ModelSpec
    batch: BatchSpec
    tokens: Tokens | None = Field(default=None, ge=1, le=MOST_TOKENS)
    framework: str | None = None
    precision: PrecisionSpec = PrecisionSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    routing: RoutingSpec = RoutingSpec()
    notes: tuple[str, ...] | None = None
    """What the facts rest on, in words that every result repeats: defaults that a file's reader took, say."""

    def __repr__(self) -> str:
        size = f"sequence {self.batch.seq_len:,}, global batch {self.batch.global_batch:,}"
        return f"WorkloadSpec({self.name}: {self.model.num_layers} layers, {size}, {self.precision.gemm})"
