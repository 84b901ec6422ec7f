"""What a search returns: its report, and the table of all that it costed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.model_flops import model_flops_per_token
from mofa.plan.result import PlanReport
from mofa.replay.garbage_collection import without_garbage_collection
from mofa.schedules import SCHEDULE_NAMES
from mofa.search.branch_and_bound import cost_pareto_front
from mofa.search.costing import NEEDLESS, CostedRows, CostedSpace, cost_all_legal_rows
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.legality.masks import JobAndMachines
from mofa.search.legality.named_check import Verdicts
from mofa.search.objective import (
    SHORTEST_STEP,
    SearchObjective,
    ranking_keys_and_missing_host_bytes,
    reject_rows_for_host_memory,
)
from mofa.search.space import OPTIONS, SpaceCombinations
from mofa.search.space_constraints import SpaceConstraints
from mofa.search.workers import WorkerProcesses
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import BALANCING, CP_KINDS, StrategyTable
from mofa.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    import pandas as pd

SHOWN_FRONT = 1.5
"""How far the front is costed for tables and pictures, as a multiple of the best step or other objective: a choice of
what is worth showing. [-]"""
DEGREES = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp", "micro_batch")


@dataclass(frozen=True)
class Search:
    """A search: its report, and the table behind it.

    Attributes
    ----------
    report
        The best plans, what was rejected and why: what ``mofa plan --json`` prints.
    costed
        The costed rows, a column for each quantity; shape (c,). :meth:`table` shows it as a data frame.
    workload, cluster, framework
        The job, the machines and the framework of the search, with what ``with_`` changed.
    reasons
        Of every strategy the index of the first check that it failed, or -1; shape (n,).
    combinations
        All n strategies that were checked, the costed rows among them.
    short
        By how much each missed that check, in the check's unit; shape (n,).
    objective
        What was made smallest.
    enumerated
        The strategies as they were before any layers were solved for, if not all that are legal were costed; else None.
    is_judged_in_closed_form
        Whether no replay follows its verdicts on memory, which leave free what it may reserve beyond closed forms.
    constraints
        What the user asked of the space.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> search = mofa.find_plans(job, machines, fix={"tp": 2, "pp": 2, "vpp": 1, "cp": 1}, replay=False)
    >>> len(search.reasons) == search.report.space, len(search.table()) >= search.report.searched
    (True, True)
    """

    report: PlanReport
    costed: CostedRows
    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec
    reasons: Verdicts
    combinations: SpaceCombinations
    short: NDArray[np.float64]
    objective: SearchObjective = SHORTEST_STEP
    enumerated: SpaceCombinations | None = None
    is_judged_in_closed_form: bool = False
    constraints: SpaceConstraints = field(default_factory=SpaceConstraints)

    def __repr__(self) -> str:
        return f"Search({self.report!r})"

    def __str__(self) -> str:
        return str(self.report)

    @cached_property
    def every_row(self) -> CostedSpace:
        """All legal rows, costed: those that bounds cut are costed now. Others have what the search says of them."""
        if self.enumerated is None:
            return CostedSpace(self.combinations, self.costed, self.reasons, self.short)
        with WorkerProcesses(1) as workers:
            all_rows = cost_all_legal_rows(*self._unjudged(), None, workers)
        reject_rows_for_host_memory(self.objective, all_rows)
        return all_rows.with_costs_and_verdicts(self.costed, self.reasons, self.short)

    @cached_property
    def _front(self) -> tuple[CostedSpace, NDArray[np.intp]]:
        return self._front_up_to(np.inf)

    @cached_property
    def _shown_front(self) -> tuple[CostedSpace, NDArray[np.intp]]:
        return self._front_up_to(SHOWN_FRONT)

    def _front_up_to(self, longest: float) -> tuple[CostedSpace, NDArray[np.intp]]:
        """Rows that hold the front of memory and objective, and the positions of it among those costed.

        Its keys are up to ``longest`` times the smallest.
        """
        if self.enumerated is None:
            found_rows = CostedSpace(self.combinations, self.costed, self.reasons, self.short)
        else:
            with without_garbage_collection():
                found_rows = cost_pareto_front(*self._unjudged(), self.objective, longest)
            reject_rows_for_host_memory(self.objective, found_rows)
        costed = found_rows.costed
        key = self._keys(costed)
        fits = np.flatnonzero((found_rows.reason[costed.rows] < 0) & np.isfinite(key))
        order = fits[np.lexsort((costed.device_bytes[fits], np.round(key[fits], 12)))]
        device = costed.device_bytes[order]
        least_before = np.concatenate([[np.inf], np.minimum.accumulate(device)[:-1]])
        is_near = key[order] <= longest * key[order[:1]]
        return found_rows, order[(device < least_before) & is_near]

    def _keys(self, costed: CostedRows) -> NDArray[np.float64]:
        """What is made smallest, of costed rows. (c,)"""
        return ranking_keys_and_missing_host_bytes(self.objective, costed)[0]

    def _unjudged(
        self,
    ) -> tuple[JobAndMachines, RoutingLoads, SpaceCombinations, Verdicts, NDArray[np.float64]]:
        """All strategies as they were enumerated, with the verdicts of the checks alone."""
        assert self.enumerated is not None
        legal = (self.reasons < 0) | (self.reasons >= NEEDLESS)
        reasons, short = np.where(legal, -1, self.reasons), np.where(legal, 0.0, self.short)
        job, loads = (
            JobAndMachines(
                self.workload, self.cluster, self.framework, is_judged_in_closed_form=self.is_judged_in_closed_form
            ),
            routing_loads_by_ep(self.workload, self.enumerated.degrees),
        )
        return job, loads, self.enumerated, reasons, short

    def front(self) -> pd.DataFrame:
        """The rows that fit and that no other beats in memory and objective at once, by closed forms, the best first.

        Columns as in :meth:`table`. Lower bounds spare most rows from being costed.

        Returns
        -------
        pandas.DataFrame
            A row a strategy; no time is above the next one's.

        Examples
        --------
        >>> import mofa
        >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
        >>> front = mofa.find_plans(job, machines, fix={"pp": 1, "cp": 1}, replay=False).front()
        >>> front["step_s"].is_monotonic_increasing, front["device_bytes"].is_monotonic_decreasing
        (True, True)
        """
        found_rows, positions = self._front
        return self._frame(found_rows.costed.select_rows(positions), np.ones(len(positions), dtype=bool))

    def table(self) -> pd.DataFrame:
        """All legal rows: the strategy's columns, step_s, tokens_per_s_per_gpu, mfu, device_bytes, fits.

        Rows that the search had no need to cost are costed when the table is first asked for.

        Returns
        -------
        pandas.DataFrame
            One row per legal strategy. Rows that do not fit have ``device_bytes``; their other quantities are NaN.
        """
        costed = self.every_row.costed
        return self._frame(costed, self.every_row.reason[costed.rows] < 0)

    def costed_table(self) -> pd.DataFrame:
        """The rows that the search and its front costed, by closed forms: those near the best, and near the front.

        Columns as in :meth:`table`, which costs all others besides. The front is that of :meth:`front` as far as
        :data:`SHOWN_FRONT` times the best: further it takes longest, and nobody chooses it.

        Returns
        -------
        pandas.DataFrame
            A row a strategy, in no order.

        Examples
        --------
        >>> import mofa
        >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
        >>> search = mofa.find_plans(job, machines, fix={"pp": 1, "cp": 1}, replay=False)
        >>> len(search.front()) <= len(search.costed_table()) <= len(search.table())
        True
        """
        import pandas as pd

        found_rows, front = self._shown_front
        longest = np.inf if self.enumerated is None else SHOWN_FRONT * self._keys(found_rows.costed)[front[:1]].sum()
        parts = []
        for costed, reasons in ((self.costed, self.reasons), (found_rows.costed, found_rows.reason)):
            fits = reasons[costed.rows] < 0
            shown = np.flatnonzero(~fits | (self._keys(costed) <= longest))
            parts.append(self._frame(costed.select_rows(shown), fits[shown]))
        known = pd.concat(parts, ignore_index=True)
        results = ("step_s", "tokens_per_s_per_gpu", "mfu", "allocated_bytes", "device_bytes", "fits")
        return known.drop_duplicates([name for name in known.columns if name not in results], ignore_index=True)

    def _frame(self, costed: CostedRows, fits: NDArray[np.bool_]) -> pd.DataFrame:
        """Costed rows, with their time where they fit."""
        import pandas as pd

        t = costed.table
        step_s = np.where(fits, costed.step_s, np.nan)
        tokens = self.workload.batch.seq_len * self.workload.batch.global_batch
        peak = self.cluster.gpu.peak_flops_per_s[self.workload.precision.peak_format].value
        flops = model_flops_per_token(self.workload.model, self.workload.batch.seq_len)
        rate = tokens / step_s / self.cluster.num_gpus
        names = np.array([m.text for m in t.recompute_modes], dtype=object)[t.recompute]
        solved = t.recompute_layers >= 0
        names[solved] = [f"full:{n}" for n in t.recompute_layers[solved]]
        return pd.DataFrame(
            {
                **{name: getattr(t, name) for name in DEGREES},
                "cp_kind": np.array(CP_KINDS, dtype=object)[t.cp_kind],
                "zero": t.zero,
                "recompute": names,
                "schedule": np.array(SCHEDULE_NAMES, dtype=object)[t.schedule],
                "token_chunks": t.token_chunks,
                "balancing": np.array(BALANCING, dtype=object)[t.balancing],
                **_options_of(t, self.framework),
                "step_s": step_s,
                "tokens_per_s_per_gpu": rate,
                "mfu": rate * flops / peak,
                "allocated_bytes": np.where(fits, costed.allocated_bytes, np.nan),
                "device_bytes": costed.device_bytes,
                "fits": fits,
            }
        )


def _options_of(table: StrategyTable, framework: FrameworkSpec) -> dict[str, NDArray[np.generic]]:
    """The framework's options of each row, by name. (c,)"""
    sets = [framework.with_options(chosen) for chosen in table.option_sets]
    return {name: np.array([getattr(of_set, name) for of_set in sets], dtype=object)[table.options] for name in OPTIONS}
