"""RUN.yaml: one training run described by its configuration alone, as estimate, measure and validate take it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mofa.specs.base import Spec
from mofa.specs.model import ModelSpec
from mofa.specs.ranges import Degree, Sequences, Tokens
from mofa.specs.routing import RoutingSpec
from mofa.specs.workload import OptimizerSpec, PrecisionSpec


class RunBatch(Spec):
    """Batch of a run."""

    seq_len: Tokens
    micro: Sequences
    global_: Sequences = Field(alias="global")


class RunSpec(Spec):
    """{id, model, framework, hardware, gpus, strategy, batch, precision, optimizer, routing}.

    ``model`` is the name of a bundled workload, a mapping ``{base: NAME, num_layers: 4, ...}`` that overrides fields
    of one, or a whole model. ``framework`` is a name or a mapping with ``name`` and any option of
    :class:`mofa.specs.framework.FrameworkSpec`. ``strategy`` holds the columns of a strategy but micro_batch and dp.
    """

    id: str = Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: str | dict[str, Any] | ModelSpec
    framework: dict[str, Any]
    hardware: str
    gpus: Degree
    strategy: dict[str, Any] = {}
    batch: RunBatch
    precision: PrecisionSpec = PrecisionSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    routing: RoutingSpec = RoutingSpec()
