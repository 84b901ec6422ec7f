"""What a search returns: its report, and the table of all that it costed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mofa.cost.model_flops import model_flops_per_token
from mofa.plan.result import PlanReport
from mofa.schedules import SCHEDULE_NAMES
from mofa.search.costing import NEEDLESS, Costed, Found, cost_rows
from mofa.search.job_setup import loads_of
from mofa.search.legality.masks import Job
from mofa.search.objective import SHORTEST_STEP, Objective, reject_for_hosts
from mofa.search.space import Combinations
from mofa.search.workers import Workers
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import BALANCING, CP_KINDS
from mofa.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    import pandas as pd

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

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> search = mofa.find_plans(job, machines, fix={"tp": 2, "pp": 2, "vpp": 1, "cp": 1}, replay=False)
    >>> len(search.reasons) == search.report.space, len(search.table()) >= search.report.searched
    (True, True)
    """

    report: PlanReport
    costed: Costed
    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec
    reasons: NDArray[np.int64]
    combinations: Combinations
    short: NDArray[np.float64]
    objective: Objective = SHORTEST_STEP
    enumerated: Combinations | None = None

    @cached_property
    def every_row(self) -> Found:
        """All legal rows, costed: those that bounds cut are costed now. Others have what the search says of them."""
        if self.enumerated is None:
            return Found(self.combinations, self.costed, self.reasons, self.short)
        legal = (self.reasons < 0) | (self.reasons >= NEEDLESS)
        reasons, short = np.where(legal, -1, self.reasons), np.where(legal, 0.0, self.short)
        job, loads = Job(self.workload, self.cluster, self.framework), loads_of(self.workload, self.enumerated.degrees)
        with Workers(1) as workers:
            all_rows = cost_rows(job, loads, self.enumerated, reasons, short, None, workers)
        reject_for_hosts(self.objective, all_rows)
        return all_rows.but(self.costed, self.reasons, self.short)

    def table(self) -> pd.DataFrame:
        """All legal rows: the strategy's columns, step_s, tokens_per_s_per_gpu, mfu, device_bytes, fits.

        Rows that the search had no need to cost are costed when the table is first asked for.

        Returns
        -------
        pandas.DataFrame
            One row per legal strategy. Rows that do not fit have ``device_bytes``; their other quantities are NaN.
        """
        import pandas as pd

        c = self.every_row.costed
        t = c.table
        fits = self.every_row.reason[c.rows] < 0
        step_s = np.where(fits, c.step_s, np.nan)
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
                "step_s": step_s,
                "tokens_per_s_per_gpu": rate,
                "mfu": rate * flops / peak,
                "allocated_bytes": np.where(fits, c.allocated_bytes, np.nan),
                "device_bytes": c.device_bytes,
                "fits": fits,
            }
        )
