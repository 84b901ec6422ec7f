"""Rank plans by a long run of each: by its failures, checkpoints and spares, not by the step alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.cost.breakdown import TIME_COMPONENTS
from mofa.cost.checkpoint import CheckpointTimes, checkpoint_bytes, checkpoint_times
from mofa.errors import SpecError
from mofa.faults.calculator import LEAST_ETTR
from mofa.faults.duration_band import run_duration_band_s, true_failure_rate_factors
from mofa.faults.ledger import PARTS, Ledger
from mofa.faults.outlook import LongRunOutlook, failure_clock, long_run_outlook
from mofa.plan.long_run import FIGURES, NO_FAULTS, CheckpointLevel, Days, Figure, LongRunDetail, Objective
from mofa.plan.result import Plan
from mofa.specs.faults import FaultSpec, PowerDrawSpec, StorageSpec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec
from mofa.units import SECONDS_PER_DAY

if TYPE_CHECKING:
    from mofa.search.costing import CostedRows

FloatN = NDArray[np.float64]
BAND_RUNS, BAND_FAILURES = 1000, 200.0
"""Simulated runs behind a band, and failures of each: a longer run is scaled from a shorter one. [-]"""

ACTIVITIES: dict[str, tuple[str, ...]] = {
    "matrix": ("gemm", "grouped_gemm", "attention", "recompute", "stragglers"),
    "memory": ("memory_bound", "optimizer"),
    "communication": ("tp", "cp", "ep", "pp", "dp"),
    "idle": ("host_idle", "bubble"),
}
"""Activities of a GPU in each part of a step, which decide its power."""


def average_step_watts(exposed_s: FloatN, power: PowerDrawSpec, tdp_w: float) -> FloatN:
    """Average power of a GPU over a step. (n,) [W]

    Parameters
    ----------
    exposed_s
        Parts of the step in the order of ``TIME_COMPONENTS``. (14, n) [s]
    power
        Shares of the TDP by what the GPU does.
    tdp_w
        Of the GPU. [W]

    Examples
    --------
    >>> step = np.zeros((14, 1))
    >>> step[TIME_COMPONENTS.index("gemm")] = step[TIME_COMPONENTS.index("bubble")] = 0.5
    >>> float(average_step_watts(step, PowerDrawSpec(), 700.0)[0]).__round__(6)
    413.0
    """
    total = exposed_s.sum(axis=0)
    watts = np.zeros_like(total)
    for name, parts in ACTIVITIES.items():
        seconds = sum(exposed_s[TIME_COMPONENTS.index(part)] for part in parts)
        watts = watts + getattr(power, f"{name}_fraction").value * tdp_w * seconds
    return np.asarray(watts / total)


@dataclass(frozen=True)
class LongRunObjective:
    """Rates the plans of one job by the whole run; the job's cluster is without the spares.

    ``spares`` are idle whole nodes beside ``cluster``. With 0 the scheduler provides replacements.
    """

    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec
    faults: FaultSpec
    objective: Objective = "tokens"
    spares: int = 0

    @property
    def spare_gpus(self) -> int:
        """GPUs of the spare nodes. [-]"""
        return self.spares * self.cluster.node.gpus_per_node

    @property
    def num_nodes(self) -> int:
        """Nodes of the job. [-]"""
        return max(self.cluster.num_gpus // self.cluster.node.gpus_per_node, 1)

    def unknown_figures(self) -> dict[Figure, str]:
        """Figures that cannot be known from these facts, with the reason."""
        faults, why = self.faults, None
        if faults.reliability is None:
            why = NO_FAULTS
        elif faults.restart is None:
            why = f"no restart times in {faults.name}; add the section restart"
        elif faults.storage is None:
            why = f"no storage given beside {faults.name}; give its rate (--storage)"
        elif faults.recovery == "replica":
            why = self._no_replicas()
        if why is not None:
            return dict.fromkeys(FIGURES, why)
        out: dict[Figure, str] = {}
        if self.workload.tokens is None:
            out = dict.fromkeys(("days", "gpu_hours", "usd", "kwh"), "no tokens to train on given")
        elif faults.price is None:
            out["usd"] = "no price given"
        return out

    def _no_replicas(self) -> str | None:
        """Why no data-parallel replica can continue without the others, whatever the plan; None where it can.

        References
        ----------
        torchtitan, docs/torchft.md: replica groups of DDP or HSDP, each of which holds all weights; the others go on.
        """
        framework = self.framework
        if not framework.traits.replicas_go_on:
            return (f"recovery replica: {framework.name} restarts all replicas together; take --framework torchtitan, "
                    "which goes on with torchft, or --recovery checkpoint")  # fmt: skip
        if framework.data_parallel != "ddp" and framework.dp_replicate == 1:
            return ("recovery replica: fsdp shards the states over all replicas; --set framework.data_parallel=hsdp "
                    "--set framework.dp_replicate=N keeps N of them")  # fmt: skip
        return None

    def num_continuing_replicas(self, dp: ArrayLike) -> NDArray[np.int64]:
        """Data-parallel replicas that can continue without one another; 1 where a failure restarts all. (n,)"""
        ranks = np.asarray(dp, dtype=np.int64)
        if self.faults.recovery == "checkpoint":
            return np.ones_like(ranks)
        return ranks if self.framework.data_parallel == "ddp" else np.minimum(self.framework.dp_replicate, ranks)

    def refuse_unknown_objective(self) -> None:
        """Refuse an objective that cannot be known."""
        need: dict[Objective, Figure] = {"days": "days", "usd": "usd", "kwh": "kwh"}
        wanted = need.get(self.objective)
        if wanted is not None and wanted in (missing := self.unknown_figures()):
            raise SpecError(f"--objective {self.objective}: {wanted} is not known, {missing[wanted]}; give it first")

    def checkpoint_times(self, per_rank_bytes: FloatN) -> CheckpointTimes:
        """Seconds of a checkpoint of each candidate."""
        assert self.faults.storage is not None
        total = checkpoint_bytes(self.workload, self.framework)
        return checkpoint_times(per_rank_bytes, total, self.cluster, self.faults.storage, self.faults.checkpoint)

    def productive_run_s(self, step_s: FloatN) -> FloatN:
        """Productive time of the run; infinite without tokens. (n,) [s]"""
        if self.workload.tokens is None:
            return np.full_like(step_s, np.inf)
        per_step = self.workload.batch.seq_len * self.workload.batch.global_batch
        return self.workload.tokens / per_step * step_s

    def long_run_outlook(
        self, step_s: FloatN, per_rank_bytes: FloatN, dp: ArrayLike, *, num_gpus: ArrayLike | None = None,
        spares: ArrayLike | None = None, rate_factor: ArrayLike = 1.0, interval_s: ArrayLike | None = None,
        every: Sequence[ArrayLike] | None = None,
    ) -> LongRunOutlook:  # fmt: skip
        """The expected long run of each candidate, on the job's GPUs and spares or on a number of them per
        candidate."""
        node = min(self.cluster.node.gpus_per_node, self.cluster.num_gpus)
        ranks = np.asarray(self.cluster.num_gpus if num_gpus is None else num_gpus)
        return long_run_outlook(
            self.faults, self.checkpoint_times(per_rank_bytes), step_s, ranks,
            np.maximum(ranks / self.cluster.node.gpus_per_node, 1.0), node,
            spares=self.spares if spares is None else spares, work_s=np.maximum(self.productive_run_s(step_s), step_s),
            rate_factor=rate_factor, interval_s=interval_s, every=every, num_replicas=self.num_continuing_replicas(dp),
        )  # fmt: skip

    def average_watts(self, outlook: LongRunOutlook, step_w: FloatN) -> FloatN:
        """Average power of everything, over all GPUs, spares included. (n,) [W]"""
        power, tdp = self.faults.power, self.cluster.gpu.tdp_w.value
        parts = outlook.parts
        idle = power.idle_fraction.value * tdp
        running = step_w * (parts["productive"] + parts["lost"]) + idle * (parts["restart"] + parts["waiting"])
        running = running + power.communication_fraction.value * tdp * parts["checkpoint"]
        job, spare = self.cluster.num_gpus, self.spare_gpus
        gpus = (running * job + idle * spare) / (job + spare)
        return np.asarray((gpus + power.node_overhead_w_per_gpu.value) * power.pue.value)

    def ranking_key(self, costed: CostedRows) -> FloatN:
        """The key to minimise: wall-clock seconds of a productive step, or joules for ``kwh``. (n,)"""
        if self.ranks_by_step_alone:
            return costed.step_s
        outlook = self.long_run_outlook(costed.step_s, costed.checkpoint_bytes, costed.table.dp)
        with np.errstate(divide="ignore", over="ignore"):
            wall = costed.step_s / outlook.ettr
        if self.objective == "kwh":
            step_w = average_step_watts(costed.exposed_s, self.faults.power, self.cluster.gpu.tdp_w.value)
            wall = wall * self.average_watts(outlook, step_w)
        return np.asarray(wall * (self.cluster.num_gpus + self.spare_gpus))

    @property
    def key_unit(self) -> str:
        """What keys are in, of one GPU or of all: seconds of wall-clock time a step, or joules."""
        return "J" if self.objective == "kwh" and not self.ranks_by_step_alone else "s"

    @property
    def key_of_one_unit(self) -> float:
        """A key of one unit."""
        return (
            1.0 if self.key_unit == "J" or self.ranks_by_step_alone else float(self.cluster.num_gpus + self.spare_gpus)
        )

    @property
    def computing_weights(self) -> dict[str, float]:
        """What computing draws more than the least that a GPU does, by family: for ``kwh`` alone. [W]"""
        if self.key_unit != "J":
            return {}
        power, tdp = self.faults.power, self.cluster.gpu.tdp_w.value
        return {
            family: (getattr(power, f"{name}_fraction").value - self._least_fraction) * tdp
            for name in ("matrix", "memory") for family in ACTIVITIES[name] if family != "optimizer"
        }  # fmt: skip

    @property
    def _least_fraction(self) -> float:
        return min(float(getattr(self.faults.power, f"{name}_fraction").value) for name in ACTIVITIES)

    @property
    def ranks_by_step_alone(self) -> bool:
        """Whether nothing is known of the long run, so that steps alone are ranked."""
        return set(FIGURES) <= set(self.unknown_figures())

    def ranking_key_lower_bound(self, step_s: FloatN, computing_j: FloatN) -> FloatN:
        """A number below :meth:`ranking_key`, of rows whose steps take at least ``step_s`` and draw at least
        ``computing_j``.

        (n,) [s], [J]

        Notes
        -----
        No plan is productive for more than :meth:`_most_productive` of the time. A step draws what it computes, and
        else the least of all activities. What is drawn beside productive steps is left out, but for idle spares and
        what is drawn around GPUs.
        """
        if self.ranks_by_step_alone:
            return step_s
        wall_s, all_gpus = step_s / self._most_productive(), self.cluster.num_gpus + self.spare_gpus
        if self.objective != "kwh":
            return np.asarray(wall_s * all_gpus)
        power, tdp = self.faults.power, self.cluster.gpu.tdp_w.value
        running = (computing_j + self._least_fraction * tdp * step_s) * self.cluster.num_gpus
        spare = power.idle_fraction.value * tdp * wall_s * self.spare_gpus
        around = power.node_overhead_w_per_gpu.value * wall_s * all_gpus
        return np.asarray((running + spare + around) * power.pue.value)

    def _most_productive(self) -> float:
        """The most that any plan's ETTR may be: it waits for nodes, and restarts in the least time that one takes. [-]

        With restarts of R and failures M apart, ``exp(-R / M)`` of the time is left
        (:func:`mofa.faults.ledger.expected_ledger_shares`). Replicas that go on without others may lose less.
        """
        if self.faults.recovery == "replica":
            return 1.0
        try:
            course = self.long_run_outlook(np.ones(1), np.zeros(1), 1)
        except SpecError:  # an interval that such a plan cannot have
            return 1.0
        restart_s = min(float(path.seconds[0]) for path in course.restart_paths)
        up = math.exp(-restart_s / float(course.mtbf_s[0]))
        return up * (1.0 - float(course.parts["waiting"][0]))

    def missing_host_bytes(self, per_rank_bytes: FloatN) -> FloatN:
        """Host memory that a node lacks for its checkpoints, if each rank saves as much as the heaviest stage's. (n,)
        [B]"""
        if self.ranks_by_step_alone:
            return np.zeros_like(per_rank_bytes)
        need = self.checkpoint_times(per_rank_bytes).host_bytes
        return np.maximum(need - self.cluster.node.host_memory_bytes.value, 0.0)

    def plan_ranking_key(self, plan: Plan) -> float:
        """:meth:`ranking_key` of a plan."""
        if self.ranks_by_step_alone:
            return plan.step_s
        outlook, step_w = self._of(plan)
        wall = plan.step_s / max(float(outlook.ettr[0]), 1e-300)
        weight = float(self.average_watts(outlook, step_w)[0]) if self.objective == "kwh" else 1.0
        return wall * weight * (self.cluster.num_gpus + self.spare_gpus)

    def _of(self, plan: Plan) -> tuple[LongRunOutlook, FloatN]:
        parts: Mapping[Any, float] = plan.time.exposed
        exposed = np.array([[parts[name]] for name in TIME_COMPONENTS])
        step_w = average_step_watts(exposed, self.faults.power, self.cluster.gpu.tdp_w.value)
        return self.outlook_of_plan(plan), step_w

    def outlook_of_plan(self, plan: Plan) -> LongRunOutlook:
        """:meth:`long_run_outlook` of one plan."""
        return self.long_run_outlook(
            np.array([plan.step_s]), np.array([plan.checkpoint_bytes or 0.0]), plan.strategy.dp
        )

    def with_long_run_figures(self, plan: Plan) -> Plan:
        """The plan with the known figures of its long run."""
        unknown = dict(self.unknown_figures())
        update: dict[str, Any] = {"spare_gpus": self.spare_gpus}
        if "ettr" not in unknown:
            outlook, step_w = self._of(plan)
            update |= self._figures(plan, outlook, float(self.average_watts(outlook, step_w)[0]), unknown)
            update["notes"] = (*plan.notes, *self._notes())
        elif self.faults.reliability is None and self.faults.price is not None:
            update |= self._price_without_failures(plan, unknown)
        return Plan(**{**_fields(plan), **update, "unknown": unknown})

    def _price_without_failures(self, plan: Plan, unknown: dict[Figure, str]) -> dict[str, Any]:
        """GPU-hours and dollars of a run in which nothing fails, where a price alone is given."""
        assert self.faults.price is not None
        if self.workload.tokens is None:
            unknown |= dict.fromkeys(("gpu_hours", "usd"), "no tokens to train on given")
            return {}
        hours = (
            float(self.productive_run_s(np.array([plan.step_s]))[0]) / 3600 * (self.cluster.num_gpus + self.spare_gpus)
        )
        del unknown["gpu_hours"], unknown["usd"]
        note = "GPU-hours and dollars are of a run in which nothing fails; --faults NAME adds what failures take"
        usd = hours * self.faults.price.usd_per_gpu_hour.value
        return {"gpu_hours": hours, "usd": usd, "notes": (*plan.notes, note)}

    def _figures(self, plan: Plan, outlook: LongRunOutlook, watts: float, unknown: dict[Figure, str]) -> dict[str, Any]:
        all_gpus = self.cluster.num_gpus + self.spare_gpus
        parts = {name: float(outlook.parts[name][0]) for name in PARTS}
        ettr, interval = parts["productive"], float(outlook.interval_s[0])
        if math.isinf(interval):
            unknown["checkpoint_interval_s"] = "nothing fails, and the run has no end; no checkpoint is needed"
        detail = LongRunDetail(
            faults=self.faults.name,
            mode=self.faults.checkpoint.mode,
            recovery=self.faults.recovery,
            num_replicas=int(self.num_continuing_replicas(plan.strategy.dp)),
            mtbf_s=None if math.isinf(outlook.mtbf_s[0]) else float(outlook.mtbf_s[0]),
            spares=self.spares,
            whole_checkpoint_bytes=checkpoint_bytes(self.workload, self.framework),
            levels=tuple(
                CheckpointLevel(
                    where=level.where,
                    every=int(level.every[0]),
                    block_s=float(level.block_s[0]),
                    persist_s=float(level.persist_s[0]),
                )
                for level in outlook.levels
            ),
            block_s=float(outlook.levels[0].block_s[0]),
            persist_s=float(outlook.levels[-1].persist_s[0]),
            safe_every=int(outlook.levels[-1].every[0]),
            restart_s=float(outlook.restart_s[0]),
            host_bytes_per_node=float(self.checkpoint_times(np.array([plan.checkpoint_bytes or 0.0])).host_bytes[0]),
            watts_per_gpu=watts,
            ledger=Ledger(**parts),
        )
        rate = plan.tokens_per_s_per_gpu * self.cluster.num_gpus / all_gpus
        out: dict[str, Any] = {
            "ettr": ettr,
            "checkpoint_interval_s": None if math.isinf(interval) else interval,
            "effective_tokens_per_s_per_gpu": rate * ettr,
            "long_run": detail,
        }
        if "days" in unknown:
            return out
        work = float(self.productive_run_s(np.array([plan.step_s]))[0])
        if ettr < LEAST_ETTR:
            why = f"the run hardly gets on; its ettr is below {LEAST_ETTR:g}"
            unknown |= dict.fromkeys(("days", "gpu_hours", "usd", "kwh"), why)
            return out
        hours = work / ettr / 3600 * all_gpus
        days = self.wall_clock_band(outlook, plan)
        out |= {"days": days, "gpu_hours": hours, "kwh": watts * hours / 1000}
        if self.faults.price is not None:
            out["usd"] = hours * self.faults.price.usd_per_gpu_hour.value
        return out

    def _notes(self) -> tuple[str, ...]:
        """What the figures rest on, in words."""
        reliability, storage, restart = self.faults.reliability, self.faults.storage, self.faults.restart
        assert reliability is not None and storage is not None and restart is not None
        rate = reliability.failures_per_node_day
        counted = reliability.counted_failures
        known = "the band takes it as known" if counted is None else f"{counted.value:,.0f} counted, in the band"
        fewer = "recovery: a step without a replica lacks its sequences; communicators take what they do in a restart"
        more = (fewer,) if self.faults.recovery == "replica" else ()
        of = "components" if rate is None else f"{rate.value * 1000:.3g} per 1000 node-days, {rate.provenance}, {known}"
        overhead = self.faults.power.node_overhead_w_per_gpu.provenance
        restarts = sorted({getattr(restart, name).provenance for name in type(restart).model_fields})
        return (
            *more,
            f"failures: {self.faults.name}, {of}; restart times {', '.join(restarts)}; nodes fail independently",
            storage_note(self.faults.name, storage),
            f"power: a model of shares of the TDP; overhead {overhead}, PUE {self.faults.power.pue.provenance}",
        )

    def wall_clock_band(self, outlook: LongRunOutlook, plan: Plan) -> Days:
        """Wall-clock time of a run of candidate 0, with its 10 to 90 % band.

        Each of many runs has a failure rate of its own (:func:`mofa.faults.duration_band.true_failure_rate_factors`),
        at which the closed form gives its mean, with the interval that was chosen for the expected rate. The run's own
        luck comes on top.
        """
        assert self.faults.reliability is not None
        step_s = np.array([plan.step_s])
        work_s, interval = float(self.productive_run_s(step_s)[0]), outlook.interval_s[0]
        mtbf, ettr = float(outlook.mtbf_s[0]), float(outlook.ettr[0])
        if math.isinf(mtbf) or work_s <= float(interval) * 1e-6:
            return Days(**dict.fromkeys(("p10", "p50", "p90"), work_s / ettr / SECONDS_PER_DAY))
        clock = failure_clock(self.faults.reliability, mtbf, self.num_nodes)
        factors = true_failure_rate_factors(clock, BAND_RUNS)
        at_quantile = self.long_run_outlook(
            step_s, np.array([plan.checkpoint_bytes or 0.0]), plan.strategy.dp, rate_factor=factors,
            interval_s=interval, every=[level.every[0] for level in outlook.levels],
        )  # fmt: skip
        with np.errstate(divide="ignore"):
            mean_s = work_s / at_quantile.ettr
        steady = replace(clock, lemon_fraction=0.0, counted_failures=None)
        longest = max(BAND_FAILURES * mtbf * ettr, 4 * float(interval))
        low, middle, high = run_duration_band_s(
            outlook.run_to_simulate(0, min(work_s, longest), steady), work_s, mean_s, factors
        )
        return Days(p10=low / SECONDS_PER_DAY, p50=middle / SECONDS_PER_DAY, p90=high / SECONDS_PER_DAY)


def storage_note(profile: str, storage: StorageSpec) -> str:
    """Whose storage checkpoints go to, with its rates, in words."""
    rates = [
        f"{fact.value / scale:.4g} {unit} ({fact.provenance})"
        for fact in (storage.write_bytes_per_s, storage.read_bytes_per_s)
        for scale, unit in ((1e12, "TB/s") if fact.value >= 1e12 else (1e9, "GB/s"),)
    ]
    if storage.write_bytes_per_s.source == "set by the user":
        return f"storage: yours, writes {rates[0]}, reads {rates[1]}"
    return f"storage: that of {profile}, writes {rates[0]}, reads {rates[1]}; --storage says yours"


def _fields(plan: Plan) -> Mapping[str, Any]:
    return {name: getattr(plan, name) for name in Plan.model_fields}
