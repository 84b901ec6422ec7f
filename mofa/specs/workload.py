"""Facts of a training job: a model, its batch, tokens and numerics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mofa.specs.base import Positive, Spec
from mofa.specs.model import ModelSpec
from mofa.specs.routing import RoutingSpec
from mofa.units import Tokens


class BatchSpec(Spec):
    """What one optimizer step consumes."""

    seq_len: Positive
    global_batch: Positive
    """Sequences per optimizer step."""


class PrecisionSpec(Spec):
    """Number formats that are part of the training recipe; the search never changes them by itself."""

    gemm: Literal["bf16", "fp8"] = "bf16"
    params: Literal["bf16", "fp32"] | None = None
    """Format of the parameters that the framework holds; its own default where absent."""
    moments: Literal["fp32", "bf16"] = "fp32"


class OptimizerSpec(Spec):
    """The optimizer and what it does besides."""

    name: Literal["adamw"] = "adamw"
    clip_grad_norm: bool = True
    implementation: Literal["fused", "foreach", "te", "for-loop"] | None = None
    """Which kernels update the weights; the framework's default where absent."""


class WorkloadSpec(Spec):
    """One training job."""

    name: str = Field(min_length=1, max_length=200)
    source: str = Field(min_length=3)
    model: ModelSpec
    batch: BatchSpec
    tokens: Tokens | None = Field(default=None, gt=0)
    framework: str | None = None
    precision: PrecisionSpec = PrecisionSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    routing: RoutingSpec = RoutingSpec()
