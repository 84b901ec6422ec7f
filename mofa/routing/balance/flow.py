"""The same schedule by maximum flows: whole tokens at once, however many replicas an expert has."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.routing.balance.replica_lp import TokenSchedule, check_loads
from mofa.routing.placement import Placement

IntA = NDArray[np.int64]


class FlowScheduler:
    """Schedules the micro-batches of one placement by maximum flows; see :class:`ReplicaScheduler` for the program.

    Notes
    -----
    With GPUs of a whole capacity ``m``, experts' tokens flow to their replicas; all get through if ``m`` is at least
    the maximum induced density. Where some don't, the GPUs on the source's side of a minimum cut are a subset whose
    density exceeds ``m`` and gives the next one: never more than the rounded-up density, which is the least whole
    maximum. The first ``m`` is the mean, or the density of the subset that bound the micro-batch before, where that is
    larger. Beyond the paper: the dual simplex takes hundreds of steps where popular experts change from one
    micro-batch to the next or have many replicas, and flows do not.

    Examples
    --------
    >>> scheduler = FlowScheduler(Placement(np.array([[1, 1, 0], [0, 1, 1]])))
    >>> scheduler.schedule_micro_batch(np.array([6, 3])).gpu_tokens.tolist()
    [3, 3, 3]
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.experts, self.gpus = placement.experts_and_gpus
        num_experts, num_gpus = placement.num_experts, placement.num_gpus
        self._source, self._sink = num_experts + num_gpus, num_experts + num_gpus + 1
        self._tails = np.concatenate(
            [np.full(num_experts, self._source), self.experts, num_experts + np.arange(num_gpus)]
        )
        self._heads = np.concatenate([np.arange(num_experts), num_experts + self.gpus, np.full(num_gpus, self._sink)])
        self._tight: tuple[NDArray[np.bool_], int] | None = None

    def schedule_micro_batch(self, loads: NDArray[Any]) -> TokenSchedule:
        """Schedule one micro-batch, as :meth:`ReplicaScheduler.schedule_micro_batch` does; ``optimum`` is the whole
        maximum."""
        from ortools.graph.python.max_flow import SimpleMaxFlow

        checked = check_loads(loads, self.placement.num_experts)
        num_gpus, total = self.placement.num_gpus, int(checked.sum())
        m = -(-total // num_gpus)
        if self._tight is not None:
            within, size = self._tight
            m = max(m, -(-int(checked[within].sum()) // size))
        solve_s = 0.0
        while True:
            flow = SimpleMaxFlow()
            capacities = np.concatenate([checked, np.full(len(self.experts), total), np.full(num_gpus, m)])
            arcs = flow.add_arcs_with_capacity(self._tails, self._heads, capacities)
            started = time.thread_time()
            flow.solve(self._source, self._sink)
            solve_s += time.thread_time() - started
            if flow.optimal_flow() == total:
                break
            m = max(m + 1, self._next(flow, checked))
        tokens = np.asarray(flow.flows(arcs[len(checked) : len(checked) + len(self.experts)]), dtype=np.int64)
        on_gpu = np.bincount(self.gpus, tokens, num_gpus).astype(np.int64)
        return TokenSchedule(tokens.astype(np.float64), tokens, on_gpu, float(on_gpu.max()), solve_s)

    def _next(self, flow: Any, loads: IntA) -> int:
        """The rounded-up density of the subset that a minimum cut shows, which is kept for the next micro-batch."""
        num_experts = self.placement.num_experts
        side = np.zeros(num_experts + self.placement.num_gpus + 2, dtype=bool)
        side[flow.get_source_side_min_cut()] = True
        subset = side[num_experts:-2]
        within = ~np.asarray((self.placement.has_replica & ~subset).any(axis=1))
        size = int(subset.sum())
        self._tight = within, size
        return -(-int(loads[within].sum()) // size)
