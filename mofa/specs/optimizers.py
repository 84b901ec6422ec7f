"""Optimizers and the kernels that run their steps: a record of each, which others ask instead of its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw"]
Implementation = Literal["fused", "foreach", "te", "for-loop"]


@dataclass(frozen=True)
class OptimizerTraits:
    """What an optimizer holds."""

    moments: tuple[str, ...]
    """Names of its tensors of a parameter's size beside the main copy, in fp32 unless a recipe says less."""

    @property
    def num_moments(self) -> int:
        """How many these are. [-]"""
        return len(self.moments)

    def main_and_moments_bytes_per_param(self, moment_bytes: float = 4.0) -> float:
        """The fp32 copy of the parameters that is stepped, and its moments, ``moment_bytes`` each. [B/param]

        Examples
        --------
        >>> OPTIMIZERS["adamw"].main_and_moments_bytes_per_param()
        12.0
        >>> OPTIMIZERS["adamw"].main_and_moments_bytes_per_param(2.0)
        8.0
        """
        return 4.0 + moment_bytes * self.num_moments


@dataclass(frozen=True)
class OptimizerStepKernels:
    """How the kernels of an implementation run an optimizer step."""

    op_by_op: bool = False
    """Weight decay, two lerps, square root, division and addcdiv are kernels of their own."""
    temporary_bytes_per_param: float = 0.0
    """What a step holds of all parameters at once. [B/param]"""
    timed_whole: bool = False
    """Whether a host's profile may have what its Python takes a tensor (``HostIssueTimes.fused_optimizer``)."""


OPTIMIZERS: Mapping[OptimizerName, OptimizerTraits] = {
    "adamw": OptimizerTraits(("Adam's first moments", "Adam's second moments")),
}
"""AdamW: Loshchilov and Hutter 2019, arXiv 1711.05101."""
ADAM_MOMENTS_BYTES = 8.0
"""Adam's two fp32 moments, which frameworks' ``states_bytes_per_param`` count; other optimizers replace them. [B/param]
"""
STEP_KERNELS: Mapping[Implementation, OptimizerStepKernels] = {
    "fused": OptimizerStepKernels(),
    "te": OptimizerStepKernels(timed_whole=True),
    "foreach": OptimizerStepKernels(op_by_op=True, temporary_bytes_per_param=4.0),
    "for-loop": OptimizerStepKernels(op_by_op=True),
}
