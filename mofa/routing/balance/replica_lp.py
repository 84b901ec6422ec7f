"""The linear program of replica loads: how many tokens of each expert every GPU that holds it gets."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.routing.balance.rounding import round_loads
from mofa.routing.placement import Placement

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]


@dataclass(frozen=True)
class Schedule:
    """Tokens of each replica in one micro-batch of one layer.

    ``fractional`` and ``tokens`` (R,) follow :attr:`~mofa.routing.placement.Placement.pairs`; ``gpu_tokens`` (G,) are
    the whole tokens of the GPUs, ``optimum`` the program's objective [tokens]; ``solve_s`` is the processor time of the
    solver, which has one thread.
    """

    fractional: FloatA
    tokens: IntA
    gpu_tokens: IntA
    optimum: float
    solve_s: float


class ReplicaScheduler:
    """The linear program of one placement, built once and solved again for each micro-batch.

    Parameters
    ----------
    placement
        Which GPUs hold which experts.

    Notes
    -----
    ``minimize m`` subject to ``sum over replicas of e: x = load_e``, ``sum over GPU g: x <= m``, ``x >= 0``. Of each
    expert the last replica is eliminated, ``x_last = load_e - sum of the others``: an expert with two replicas is one
    variable with an upper bound, and only experts with three and more have a row of their own. Loads then appear in
    bounds alone, so that the basis of the micro-batch before stays dual feasible and the dual simplex (GLOP) goes on
    from it. Tokens are in units of the mean load of a GPU.

    The optimum is the maximum induced density (:mod:`mofa.routing.density`).

    References
    ----------
    MicroMoE, arXiv 2511.16947, section 5.1, LPP 1, which uses HiGHS; rounding is not discussed there.

    Examples
    --------
    Three GPUs in a row: the expert of the first two has 6 tokens, that of the last two 3.

    >>> scheduler = ReplicaScheduler(Placement(np.array([[1, 1, 0], [0, 1, 1]])))
    >>> scheduler.solve(np.array([6, 3])).gpu_tokens.tolist()
    [3, 3, 3]
    """

    def __init__(self, placement: Placement) -> None:
        from ortools.linear_solver import pywraplp

        self.placement = placement
        self.experts, self.gpus = placement.pairs
        num_experts, num_gpus = placement.num_experts, placement.num_gpus
        last = np.append(np.flatnonzero(np.diff(self.experts)), len(self.experts) - 1)
        self._last = last
        self._free = np.setdiff1d(np.arange(len(self.experts)), last)
        count = np.bincount(self.experts, minlength=num_experts)
        self._two, self._many = count[self.experts[self._free]] == 2, np.flatnonzero(count > 2)
        solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        infinity = solver.infinity()
        m = solver.NumVar(0.0, infinity, "")
        rows = [solver.Constraint(-infinity, 0.0) for _ in range(num_gpus)]
        sums = {int(e): solver.Constraint(-infinity, 0.0) for e in self._many}
        for row in rows:
            row.SetCoefficient(m, -1.0)
        variables = []
        for i in self._free:
            x = solver.NumVar(0.0, infinity, "")
            expert = int(self.experts[i])
            rows[self.gpus[i]].SetCoefficient(x, 1.0)
            # where both replicas lie on one GPU, nothing is left to decide
            rows[self.gpus[last[expert]]].SetCoefficient(x, -1.0)
            if expert in sums:
                sums[expert].SetCoefficient(x, 1.0)
            variables.append(x)
        solver.Objective().SetCoefficient(m, 1.0)
        solver.Objective().SetMinimization()
        solver.SetSolverSpecificParametersAsString("use_dual_simplex: true use_preprocessing: false use_scaling: false")
        self._solver, self._m, self._rows, self._sums, self._variables = solver, m, rows, sums, variables

    def solve(self, loads: NDArray[Any]) -> Schedule:
        """Schedule one micro-batch.

        Parameters
        ----------
        loads
            Whole tokens of each expert, over all GPUs of the group. (E,) [tokens]

        Raises
        ------
        SpecError
            If the loads are of another number of experts, negative, fractional, or all 0.
        """
        whole = checked_loads(loads, self.placement.num_experts)
        unit = float(whole.sum()) / self.placement.num_gpus
        scaled = whole / unit
        self._update(scaled)
        started = time.thread_time()
        status = self._solver.Solve()
        solve_s = time.thread_time() - started
        if status != self._solver.OPTIMAL:
            raise SpecError(f"replica loads: the solver ended with status {status}; check the loads")
        x = np.empty(len(self.experts))
        x[self._free] = [variable.solution_value() for variable in self._variables]
        x[self._last] = scaled - np.bincount(self.experts[self._free], x[self._free], len(scaled))
        x = np.maximum(x, 0.0) * unit
        tokens = round_loads(x, whole, self.experts, self.gpus, self.placement.num_gpus)
        on_gpu = np.bincount(self.gpus, tokens, self.placement.num_gpus).astype(np.int64)
        return Schedule(x, tokens, on_gpu, float(self._m.solution_value()) * unit, solve_s)

    def _update(self, scaled: FloatA) -> None:
        """Loads into the bounds."""
        infinity = self._solver.infinity()
        fixed = np.bincount(self.gpus[self._last], scaled, self.placement.num_gpus)
        for row, load in zip(self._rows, fixed.tolist(), strict=True):
            row.SetBounds(-infinity, -load)
        for variable, two, load in zip(
            self._variables, self._two.tolist(), scaled[self.experts[self._free]].tolist(), strict=True
        ):
            if two:
                variable.SetUb(load)
        for expert, row in self._sums.items():
            row.SetBounds(-infinity, float(scaled[expert]))


def checked_loads(loads: NDArray[Any], num_experts: int) -> IntA:
    """Loads as whole numbers, or an error that names the first wrong one."""
    given = np.asarray(loads)
    if given.shape != (num_experts,):
        raise SpecError(f"loads: are of {given.size} experts, the placement has {num_experts}; pass one for each")
    bad = ~(np.isfinite(given) & (given >= 0) & (given == np.floor(given)))
    if bad.any():
        i = int(np.argmax(bad))
        raise SpecError(f"loads: expert {i} has {given[i]:g} tokens; write a whole number of at least 0")
    if not given.any():
        raise SpecError("loads: all are 0; there is nothing to balance")
    return given.astype(np.int64)
