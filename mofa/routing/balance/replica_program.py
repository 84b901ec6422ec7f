"""The linear program of replica loads over some of the replicas, on GLOP: built once, solved again and again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError

FloatA = NDArray[np.float64]
_PLAIN = "use_preprocessing: false use_scaling: false"
"""Coefficients are 1 and -1, and a presolved program could not be gone on from."""


@dataclass(frozen=True)
class ReplicaSolution:
    """``replica_tokens`` (R,) tokens of each replica, ``fullest_gpu_tokens`` of the fullest GPU, both in the unit of
    the loads.

    ``price`` (G,) is what one more token on a GPU adds to ``fullest_gpu_tokens``; prices are at least 0 and sum to 1
    [-]. ``solve_s`` is the solver's processor time, ``num_pivots`` its steps of the simplex.
    """

    replica_tokens: FloatA
    fullest_gpu_tokens: float
    price: FloatA
    solve_s: float
    num_pivots: int


class ReplicaProgram:
    """``minimize m`` subject to ``sum over replicas of e: x = load_e``, ``sum over GPU g: x <= m``, ``x >= 0``.

    Parameters
    ----------
    experts, gpus
        Expert and GPU of each replica, by expert, from 0. (R,)
    base
        One replica of each expert, which has what the others leave. (R,) of truth values
    num_gpus
        GPUs of the group.

    Notes
    -----
    ``x_base = load - sum of the others`` is eliminated: an expert with two replicas is one variable with an upper
    bound, and only experts with three and more have a row of their own. Loads then appear in bounds alone. The first
    solve has everything on the bases, which is feasible, and goes on by the primal simplex; after a change of loads the
    basis stays dual feasible, and the dual simplex goes on from it.

    Examples
    --------
    One expert on two GPUs, the second of which has another one too.

    >>> program = ReplicaProgram(np.array([0, 0, 1]), np.array([0, 1, 1]), np.array([True, False, True]), 2)
    >>> found = program.solve(np.array([5.0, 1.0]))
    >>> found.fullest_gpu_tokens, found.replica_tokens.tolist(), found.price.tolist()
    (3.0, [3.0, 2.0, 1.0], [0.5, 0.5])
    """

    def __init__(
        self, experts: NDArray[np.intp], gpus: NDArray[np.intp], base: NDArray[np.bool_], num_gpus: int
    ) -> None:
        from ortools.linear_solver import pywraplp

        self._base, self._free, self._base_gpu = base, np.flatnonzero(~base), gpus[base]
        self._of = experts[self._free]
        others = np.bincount(self._of, minlength=len(self._base_gpu))
        self._alone = others[self._of] == 1
        solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        infinity = solver.infinity()
        m = solver.NumVar(0.0, infinity, "")
        rows = [solver.Constraint(-infinity, 0.0) for _ in range(num_gpus)]
        sums = {int(e): solver.Constraint(-infinity, 0.0) for e in np.flatnonzero(others > 1)}
        for row in rows:
            row.SetCoefficient(m, -1.0)
        variables = []
        for expert, gpu in zip(self._of.tolist(), gpus[self._free].tolist(), strict=True):
            x = solver.NumVar(0.0, infinity, "")
            rows[gpu].SetCoefficient(x, 1.0)
            rows[self._base_gpu[expert]].SetCoefficient(x, -1.0)
            if expert in sums:
                sums[expert].SetCoefficient(x, 1.0)
            variables.append(x)
        solver.Objective().SetCoefficient(m, 1.0)
        solver.Objective().SetMinimization()
        solver.SetSolverSpecificParametersAsString(f"use_dual_simplex: false {_PLAIN}")
        self._solver, self._m, self._rows, self._sums, self._variables = solver, m, rows, sums, variables
        self._warm = False

    def solve(self, loads: FloatA) -> ReplicaSolution:
        """The optimum for loads of the experts, best in units of a GPU's mean. (E,)

        Raises
        ------
        SpecError
            If the solver finds none.
        """
        self._update(loads)
        started = time.thread_time()
        status = self._solver.Solve()
        solve_s = time.thread_time() - started
        if status != self._solver.OPTIMAL:
            raise SpecError(f"replica loads: the solver ended with status {status}; check the loads")
        if not self._warm:
            self._solver.SetSolverSpecificParametersAsString(f"use_dual_simplex: true {_PLAIN}")
            self._warm = True
        given = np.array([variable.solution_value() for variable in self._variables])
        x = np.empty(len(self._base))
        x[self._free] = given
        x[self._base] = loads - np.bincount(self._of, given, len(loads))
        price = np.maximum([-row.dual_value() for row in self._rows], 0.0)
        return ReplicaSolution(
            x, float(self._m.solution_value()), price / price.sum(), solve_s, self._solver.iterations()
        )

    def _update(self, loads: FloatA) -> None:
        """Loads into the bounds."""
        infinity = self._solver.infinity()
        on_bases = np.bincount(self._base_gpu, loads, len(self._rows))
        for row, load in zip(self._rows, on_bases.tolist(), strict=True):
            row.SetBounds(-infinity, -load)
        most = zip(self._variables, self._alone.tolist(), loads[self._of].tolist(), strict=True)
        for variable, alone, load in most:
            if alone:
                variable.SetUb(load)
        for expert, row in self._sums.items():
            row.SetBounds(-infinity, float(loads[expert]))
