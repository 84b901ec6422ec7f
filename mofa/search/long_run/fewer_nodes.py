"""A plan on fewer nodes, with the others as spares, at exactly the same global batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mofa.errors import StrategyError
from mofa.plan.result import Plan
from mofa.schedules import default_schedule
from mofa.search.entry_points import find_plans
from mofa.search.goodput import LongRunObjective
from mofa.search.long_run.spare_nodes import SCOUTED, spare_counts_most_promising_first, without_spares
from mofa.search.near_best import space_near_best
from mofa.search.one_plan import plan_in_closed_form
from mofa.search.search_result import Search
from mofa.search.space import MAX_PP, default_space, divisors, without_indivisible_degrees
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.strategy_defaults import default_zero_stage
from mofa.specs.workload import WorkloadSpec

FloatN = NDArray[np.float64]
IntN = NDArray[np.int64]
COSTED, TRIED = 48, 1000
"""Most sizes of a plan that are costed, and that are considered for costing: those with the best guesses. [-]"""
Size = tuple[int, int, int]
"""Pipeline stages, virtual ones of each and replicas of a plan. [-]"""


@dataclass(frozen=True)
class PlanWithSpares:
    """A plan on the computing machines, and the number of spare nodes beside them."""

    plan: Plan
    machines: ClusterSpec
    spares: int = 0


@dataclass(frozen=True)
class FewerNodesOfPlan:
    """Sizes of one plan on fewer nodes of its machines: it gives up replicas, pipeline stages or both.

    Megatron and torchtitan demand the same number of whole micro-batches of each replica. So only numbers of replicas
    run that divide the batch so. The plan's other degrees stay.
    """

    all_nodes: PlanWithSpares
    job: WorkloadSpec
    framework: FrameworkSpec
    costed: dict[Size, Plan | None] = field(default_factory=dict)
    """Plans by size, reused for other checkpoint modes; None where a size does not run or fit."""

    @property
    def plan(self) -> Plan:
        """The plan on all nodes."""
        return self.all_nodes.plan

    def plan_on_all_nodes(self, runs: LongRunObjective) -> PlanWithSpares:
        """The plan on all nodes, the same for every long run."""
        assert runs.spares == 0
        return self.all_nodes

    def sizes_leaving_spares(self, least: int, most: int) -> list[Size]:
        """Sizes that leave ``least`` to ``most`` whole nodes as spares."""
        s, num_gpus = self.all_nodes.plan.strategy, self.all_nodes.machines.num_gpus
        node, each = self.all_nodes.machines.node.gpus_per_node, s.tp * s.cp
        shares = divisors(self.job.batch.global_batch // s.micro_batch, s.dp)
        out = []
        for pp in range(1, s.pp + 1):
            for dp in shares:
                rest = num_gpus - each * pp * dp
                if rest > 0 and rest % node == 0 and least <= rest // node <= most:
                    out += [(pp, vpp, dp) for vpp in self._virtual(pp)]
        return out

    def _virtual(self, pp: int) -> list[int]:
        """Virtual stages for a pipeline depth: up to the plan's, where they divide the layers.

        Embedding and head may count as layers. A schedule that fixes its virtual stages keeps them.
        """
        s, layers = self.all_nodes.plan.strategy, self.job.model.num_layers
        if s.schedule != default_schedule(s.vpp):
            return [s.vpp]
        return [v for v in range(1, s.vpp + 1) if v == 1 or (pp > 1 and -layers % (pp * v) <= 2)]

    def best_plan_with_spares(self, runs: LongRunObjective, least: int, most: int) -> PlanWithSpares | None:
        """The size with the most effective tokens per second; None where none runs and fits.

        Parameters
        ----------
        runs
            The long run on all nodes, without spares.
        least, most
            Spare nodes. [nodes]

        Notes
        -----
        Closed forms rate all sizes at once by :meth:`guessed_step_s`; the best ``COSTED`` of them are costed.
        """
        sizes = self.sizes_leaving_spares(max(least, 1), most)
        if not sizes:
            return None
        machines, s, plan = self.all_nodes.machines, self.all_nodes.plan.strategy, self.all_nodes.plan
        pp, vpp, dp = (np.array(column) for column in zip(*sizes, strict=True))
        num_gpus = s.tp * s.cp * pp * dp
        step_s = self.guessed_step_s(pp, vpp, dp)
        bytes_ = (plan.checkpoint_bytes or 0.0) * s.pp * s.dp / (pp * dp)
        spares = (machines.num_gpus - num_gpus) // machines.node.gpus_per_node
        outlook = runs.long_run_outlook(step_s, bytes_, dp, spares=spares, num_gpus=num_gpus)
        order = np.argsort(-outlook.ettr / step_s, kind="stable")[:TRIED]
        standing = (smaller for smaller in (self.plan_at_size(sizes[i]) for i in order) if smaller is not None)
        return _best(runs, list(itertools.islice(standing, COSTED)))

    def guessed_step_s(self, pp: IntN, vpp: IntN, dp: IntN) -> FloatN:
        """Guessed time of a step at other sizes, from the plan's own stages and micro-batches. (n,) [s]

        ``t (m + (p - 1) / v)``: m micro-batches, v virtual stages, p stages, and t inversely proportional to p. What
        comes once a step is left out.
        """
        plan, s = self.all_nodes.plan, self.all_nodes.plan.strategy
        exposed, batch = plan.time.exposed, self.job.batch.global_batch // s.micro_batch
        stage_s = (plan.step_s - sum(exposed[name] for name in ("bubble", "dp", "optimizer"))) * s.dp / batch
        return np.asarray(stage_s * s.pp / pp * (batch / dp + (pp - 1) / vpp))

    def plan_at_size(self, size: Size) -> PlanWithSpares | None:
        """The plan of one size, costed; None where it does not run or fit."""
        pp, vpp, dp = size
        s, machines = self.all_nodes.plan.strategy, self.all_nodes.machines
        smaller = machines.model_copy(update={"num_gpus": s.tp * s.cp * pp * dp})
        if size not in self.costed:
            schedule = s.schedule if vpp == s.vpp else default_schedule(vpp)
            layout = s.layout if (pp, vpp) == (s.pp, s.vpp) else ""
            wanted = s.model_copy(
                update={
                    "pp": pp, "vpp": vpp, "dp": dp, "schedule": schedule, "zero": self._zero(pp, dp), "layout": layout,
                }
            )  # fmt: skip
            self.costed[size] = self._plan(wanted, smaller)
        plan = self.costed[size]
        spares = (machines.num_gpus - smaller.num_gpus) // machines.node.gpus_per_node
        return None if plan is None else PlanWithSpares(plan, smaller, spares)

    def _zero(self, pp: int, dp: int) -> int:
        """ZeRO stage at this size: the framework's default if the plan has that, else the plan's."""
        s = self.all_nodes.plan.strategy
        own, smaller = (int(default_zero_stage(self.framework, d, s.cp, p)) for d, p in ((s.dp, s.pp), (dp, pp)))
        return smaller if s.zero == own else s.zero

    def _plan(self, strategy: StrategySpec, machines: ClusterSpec) -> Plan | None:
        try:
            plan = plan_in_closed_form(self.job, machines, strategy, framework=self.framework)
        except StrategyError:
            return None
        return plan if plan.memory.fits else None


@dataclass(frozen=True)
class FewerNodesReplanned:
    """New plans for every checkpoint mode, on all nodes or on fewer.

    The costly part, a search, is done once: other checkpoint modes rank the same costs by other long runs.
    """

    search: Search
    machines: ClusterSpec
    smaller: dict[int, Search | None] = field(default_factory=dict)
    """Searches by number of spare nodes; None where the other nodes have no legal plan."""

    @property
    def plan(self) -> Plan:
        """The plan with the fastest step on all nodes."""
        return self.search.report.plans[0]

    def plan_on_all_nodes(self, runs: LongRunObjective) -> PlanWithSpares:
        """The best plan on all nodes by its long run; the one with the fastest step if host memory suffices for
        none."""
        ranked = self._ranked(self.search, runs)
        return PlanWithSpares(ranked or self.plan, self.machines)

    def best_plan_with_spares(self, runs: LongRunObjective, least: int, most: int) -> PlanWithSpares | None:
        """The best plan with spare nodes, of the most promising numbers of spares that leave a plan to run."""
        left: list[PlanWithSpares] = []
        for spares in self._numbers(runs, least, most):
            smaller = without_spares(self.machines, spares, "spares")
            if spares not in self.smaller:
                self.smaller[spares] = self._searched(smaller)
            search = self.smaller[spares]
            plan = None if search is None else self._ranked(search, replace(runs, cluster=smaller, spares=spares))
            if plan is not None:
                left.append(PlanWithSpares(plan, smaller, spares))
        return _best(runs, left)

    def _numbers(self, runs: LongRunObjective, least: int, most: int) -> list[int]:
        """Numbers of spare nodes whose other nodes suit degrees and batch: the most promising ones.

        If a least number is asked for, the smallest from there on instead. Half of all nodes is tried too: what runs on
        all runs there.
        """
        nodes, node = runs.num_nodes, self.machines.node.gpus_per_node
        asked = range(least, most + 1) if least else spare_counts_most_promising_first(runs, self.plan)
        space = default_space(self.search.workload, self.machines, self.search.framework)
        batch = self.search.workload.batch.global_batch
        ranks = {t * c * p for t in space.tp for c in space.cp for p in range(1, MAX_PP + 1)}
        runnable = {r * d for d in divisors(batch, self.machines.num_gpus) for r in ranks}
        numbers = [n for n in asked if n <= most and (nodes - n) * node in runnable][:SCOUTED]
        half = nodes // 2
        more = nodes % 2 == 0 and max(least, 1) <= half <= most and half not in numbers
        return [*numbers, half] if more else numbers

    def _searched(self, smaller: ClusterSpec) -> Search | None:
        """A search on fewer GPUs, near the best plans on all."""
        job, framework = self.search.workload, self.search.framework
        space = without_indivisible_degrees(
            default_space(job, smaller, framework), smaller.num_gpus, job.batch.global_batch
        )
        if not space.pp:
            return None
        near = space_near_best(self.search.costed, self.search.reasons, space)
        search = find_plans(
            job, smaller, framework=framework, top=1, replay=False, space=near, banded=False, every_row=True,
            closed_form_margin=False,
        )  # fmt: skip
        return search if search.report.plans else None

    def _ranked(self, search: Search, runs: LongRunObjective) -> Plan | None:
        report = find_plans(
            search.workload, search.cluster, framework=search.framework, top=1, replay=False, judge=runs,
            searched=search, banded=False, closed_form_margin=False,
        )  # fmt: skip
        return report.report.plans[0] if report.report.plans else None


def long_runs_on_computing_nodes(runs: LongRunObjective, left: PlanWithSpares) -> LongRunObjective:
    """The long runs of the computing machines."""
    return replace(runs, cluster=left.machines, spares=left.spares)


def _best(runs: LongRunObjective, left: list[PlanWithSpares]) -> PlanWithSpares | None:
    """The one with the most effective tokens per second."""
    return min(
        left,
        key=lambda standing: long_runs_on_computing_nodes(runs, standing).plan_ranking_key(standing.plan),
        default=None,
    )
