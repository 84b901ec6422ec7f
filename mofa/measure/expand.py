"""A run with its model and strategy spelled out, ready to be told to a framework."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mofa.errors import SpecError
from mofa.measure.records import configuration_hash
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import GpuSpec
from mofa.specs.layer_kind_params import refuse_unmodelled_layer_kinds
from mofa.specs.model import ModelSpec
from mofa.specs.routing import RoutingSpec
from mofa.specs.run import RunSpec
from mofa.specs.run_files import resolve_run
from mofa.specs.strategy import RecomputeSpec, StrategySpec
from mofa.specs.strategy_defaults import default_zero_stage

_WRITTEN_OUT = (
    "compile", "allocator", "attention", "data_parallel", "optimizer", "overlap_grad_reduce", "overlap_param_gather",
)  # fmt: skip
"""Options of a framework that a record always says, so that a later default changes no record."""


@dataclass(frozen=True)
class ExpandedRun:
    """A run with its model, framework, complete strategy and GPU, and the micro-batches of a rank per step."""

    run: RunSpec
    model: ModelSpec
    framework: FrameworkSpec
    strategy: StrategySpec
    num_micro_batches: int
    gpu: GpuSpec

    @property
    def recompute(self) -> RecomputeSpec:
        """The recomputation that the run's strategy names."""
        return RecomputeSpec.parse(self.strategy.recompute)

    @property
    def configuration_hash(self) -> str:
        """The hash of what runs: of the run spelled out, its ZeRO stage told as of today where nothing is sharded.

        Records of before that was known say 3 of an FSDP group of one rank, which torchtitan does not wrap.
        """
        run, s = self.run_with_full_specs(), self.strategy
        if int(default_zero_stage(self.framework, s.dp, s.cp, s.pp)) == 0:
            run = run.model_copy(update={"strategy": {**run.strategy, "zero": 0}})
        return configuration_hash(run)

    def refusal(self, what: str, instead: str) -> SpecError:
        """The one line that says why this run cannot be measured."""
        return SpecError(f"{self.run.id}: {self.framework.name} cannot run {what}; {instead}")

    def run_with_full_specs(self) -> RunSpec:
        """The run with its model, strategy and options in full: a later change to a workload changes no record."""
        model = self.model.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        model["attention"]["kind"] = self.model.attention.kind
        without = {"micro_batch", "dp", "framework"} | ({"cp_kind"} if self.strategy.cp == 1 else set())
        strategy = self.strategy.model_dump(mode="json", exclude=without)
        options = {key: getattr(self.framework, key) for key in _WRITTEN_OUT}
        framework = {**options, **self.run.framework, "name": self.framework.name}
        framework = {"name": framework.pop("name"), **framework}
        return self.run.model_copy(update={"model": model, "strategy": strategy, "framework": framework})


def expand_run(run: RunSpec, base_dir: Path | None = None) -> ExpandedRun:
    """Load all that a run names.

    Raises
    ------
    SpecError
        If something is missing, its degrees do not fit its GPUs and its batch, or its layers are not modelled yet.
    """
    workload, cluster, framework, strategy = resolve_run(run, base_dir)
    refuse_unmodelled_layer_kinds(workload.model)
    micro_batches = run.batch.global_ // (strategy.dp * run.batch.micro)
    return ExpandedRun(run, workload.model, framework, strategy, micro_batches, cluster.gpu)


def current_configuration_hash(run: RunSpec) -> str:
    """The hash of a run spelled out by the fields of today; equal for two records of one configuration.

    A record says the fields there were when it was written: spelled out anew, it says those that came later too.
    """
    return expand_run(run).configuration_hash


def token_copies_routed_per_step(run: ExpandedRun) -> int:
    """Token copies that one rank's router sends to experts in one step and layer. [tokens]"""
    if run.model.moe is None:
        return 0
    batch, s = run.run.batch, run.strategy
    tokens = batch.micro * run.num_micro_batches * batch.seq_len // s.cp
    if s.sp and not run.framework.traits.has_pytorch_modules:
        tokens //= s.tp
    return tokens * run.model.moe.top_k


def router_logit_bias(routing: RoutingSpec, num_experts: int) -> list[float] | None:
    """What is added to an expert's logit, so that tokens fall on experts about as the routing says.

    The logarithm of the expert's share; experts are shuffled by the seed, so that the popular ones are not all on
    the first rank. None for balanced routing, which both frameworks offer themselves.
    """
    rng = np.random.default_rng(routing.seed)
    order = rng.permutation(num_experts)
    if routing.kind == "balanced":
        return None
    if routing.kind == "zipf":
        assert routing.s is not None
        logits = -routing.s * np.log1p(order)
    elif routing.kind == "dirichlet":
        assert routing.alpha is not None
        logits = np.log(np.maximum(rng.dirichlet(np.full(num_experts, routing.alpha)), 1e-6))
    elif routing.kind == "lognormal":
        assert routing.sigma is not None
        logits = routing.sigma * rng.standard_normal(num_experts)
    else:
        raise SpecError(
            f"routing.kind: {routing.kind} cannot be measured, only estimated; use zipf, dirichlet or lognormal"
        )
    return [round(float(x), 4) for x in logits - logits.mean()]
