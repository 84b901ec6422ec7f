"""A job that is exported: the plan with all that it was predicted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mofa.errors import SpecError
from mofa.plan.launch_layout import LaunchLayout
from mofa.plan.result import Plan
from mofa.plan.summaries import ClusterSummary
from mofa.specs.framework import FrameworkSpec
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import RecomputeSpec, StrategySpec
from mofa.specs.workload import WorkloadSpec


@dataclass(frozen=True)
class ExportJob:
    """A plan, the workload and framework that it is for, and the machines.

    ``fields`` of tables are dotted paths below it: ``strategy``, ``framework``, ``model``, ``batch``, ``precision``,
    ``optimizer``, ``routing``, ``tokens``, ``name`` and ``source``.
    """

    workload: WorkloadSpec
    framework: FrameworkSpec
    """With the options that the strategy chooses."""
    plan: Plan
    cluster: ClusterSummary
    nvls: bool
    """Whether the prediction counts on NVLink's in-switch reduction."""
    to: str
    """The framework whose files are written, for messages."""

    @property
    def strategy(self) -> StrategySpec:
        """How it is laid out on its GPUs."""
        return self.plan.strategy

    @property
    def model(self) -> ModelSpec:
        """What is trained."""
        return self.workload.model

    @property
    def has_latent_attention(self) -> bool:
        """Whether its attention is Megatron's multi-latent one."""
        return self.model.attention_kind.megatron.has_latents

    @property
    def layout(self) -> LaunchLayout | None:
        """The layout of the pipeline that was costed."""
        return self.plan.layout

    @property
    def recompute(self) -> RecomputeSpec:
        """What is recomputed."""
        return RecomputeSpec.parse(self.strategy.recompute)

    @property
    def num_gpus(self) -> int:
        """GPUs that compute, those that stand by left out. [-]"""
        s = self.strategy
        return s.tp * s.cp * s.pp * s.dp

    @property
    def num_nodes(self) -> int:
        """Nodes that they fill. [-]"""
        return -(-self.num_gpus // self.cluster.gpus_per_node)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node that it uses. [-]"""
        return min(self.cluster.gpus_per_node, self.num_gpus)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each replica in a step. [-]"""
        return self.workload.batch.global_batch // (self.strategy.dp * self.strategy.micro_batch)

    @property
    def num_steps(self) -> int | None:
        """Steps for the workload's tokens; None where it says none. [-]"""
        batch, tokens = self.workload.batch, self.workload.tokens
        return None if tokens is None else max(-(-int(tokens) // (batch.seq_len * batch.global_batch)), 1)

    def value_at_path(self, path: str) -> Any:
        """The value at a dotted path; None below what is absent.

        Raises
        ------
        KeyError
            If the path begins with no part of a job.
        """
        first, _, rest = path.partition(".")
        value: Any = {"strategy": self.strategy, "framework": self.framework}.get(first, self.workload)
        if value is self.workload:
            rest = path
        for key in rest.split("."):
            value = getattr(value, key, None)
        return value

    def refusal(self, what: str, why: str) -> SpecError:
        """The one line that says why this job cannot be exported."""
        return SpecError(f"{self._place}{what} cannot be said: {why}")

    def refusals(self, reasons: Sequence[SpecError]) -> SpecError:
        """One line of all reasons why this job cannot be exported, each once.

        Parameters
        ----------
        reasons
            At least one, as :meth:`refusal` makes them.
        """
        lines = dict.fromkeys(str(reason).removeprefix(self._place) for reason in reasons)
        return SpecError(self._place + "; ".join(lines))

    @property
    def _place(self) -> str:
        return f"export to {self.to}: "
