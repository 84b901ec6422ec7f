"""The linear program that weighs the tokens which leave their GPU, and their node, against the fullest GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.routing.balance.replica_lp import TokenSchedule, check_loads
from mofa.routing.balance.rounding import round_replica_tokens
from mofa.routing.placement import Placement

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]


@dataclass(frozen=True)
class TransferCosts:
    """Cost of a token sent or received over that of one computed. [-]

    ``intra`` weighs every token that leaves its GPU, ``inter`` those that leave their node besides; the paper's
    evaluation has 0.1 and 1.0 (appendix C.3).
    """

    intra: float = 0.1
    inter: float = 1.0
    gpus_per_node: int = 8


@dataclass(frozen=True)
class CommunicationSchedule(TokenSchedule):
    """A schedule with what the program says of its communication. [tokens]

    ``sent`` is the most tokens that a GPU sends or receives, ``crossing`` the most that a node does, per GPU.
    """

    sent: float
    crossing: float


class CommunicationScheduler:
    """The communication-aware program of one placement, built once and solved again for each micro-batch.

    Parameters
    ----------
    placement
        Which GPUs hold which experts; GPUs of a node are numbered one after the other.
    weights
        What a token sent costs.

    Notes
    -----
    ``minimize comp + intra * comm + inter * cross`` where, with ``x`` the tokens of a replica and ``input`` those that
    a GPU has for an expert,

    - ``comp >= sum over GPU: x``, ``sum over replicas: x = load``;
    - ``local <= x``, ``local <= input`` for each replica; ``comm >= input of g - local of g`` (sent) and
      ``comm >= x of g - local of g`` (received), for each GPU;
    - ``stays <= sum of x on the node``, ``stays <= input of the node`` for each expert and node that holds it;
      ``cross * gpus of the node >= input of the node - stays`` and ``>= x of the node - stays``.

    Corrected from the paper: its ``send_g`` sums over the experts that g holds, which leaves out all tokens for
    others; here everything counts that is not local, so that ``intra`` and ``inter`` both weigh a token that leaves the
    node. A node's NICs are taken to be shared by its GPUs. Loads and inputs are bounds, so that the basis of the
    micro-batch before can be gone on from, as in :class:`~mofa.routing.balance.replica_lp.ReplicaScheduler`.

    References
    ----------
    MicroMoE, arXiv 2511.16947, appendix A.1, LPP 4.

    Examples
    --------
    Two GPUs with both experts each: everything stays where it is.

    >>> scheduler = CommunicationScheduler(Placement(np.ones((2, 2), dtype=int)), TransferCosts())
    >>> scheduler.schedule_micro_batch(np.array([[5, 1], [1, 5]])).sent
    0.0
    """

    def __init__(self, placement: Placement, weights: TransferCosts) -> None:
        from ortools.linear_solver import pywraplp

        self.placement, self.weights = placement, weights
        self.experts, self.gpus = placement.experts_and_gpus
        self.node = np.arange(placement.num_gpus) // weights.gpus_per_node
        solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        self._solver, infinity = solver, solver.infinity()

        def row(low: float, high: float, terms: list[tuple[Any, float]]) -> Any:
            made = solver.Constraint(low, high)
            for variable, coefficient in terms:
                made.SetCoefficient(variable, coefficient)
            return made

        def new(count: int) -> list[Any]:
            return [solver.NumVar(0.0, infinity, "") for _ in range(count)]

        num, nodes = len(self.experts), int(self.node.max()) + 1
        x, local = new(num), new(num)
        comp, comm, cross = new(3)
        of_expert = [np.flatnonzero(self.experts == e) for e in range(placement.num_experts)]
        of_gpu = [np.flatnonzero(self.gpus == g) for g in range(placement.num_gpus)]
        self._sums = [row(0.0, 0.0, [(x[i], 1.0) for i in which]) for which in of_expert]
        for i in range(num):
            row(-infinity, 0.0, [(local[i], 1.0), (x[i], -1.0)])
        self._send, self._cross = [], []
        for which in of_gpu:
            row(-infinity, 0.0, [(comp, -1.0), *((x[i], 1.0) for i in which)])
            self._send.append(row(0.0, infinity, [(comm, 1.0), *((local[i], 1.0) for i in which)]))
            row(0.0, infinity, [(comm, 1.0), *((x[i], -1.0) for i in which), *((local[i], 1.0) for i in which)])
        stays_of: list[list[Any]] = [[] for _ in range(nodes)]
        self._stays: list[tuple[Any, int, int]] = []
        for expert, which in enumerate(of_expert):
            for n in np.unique(self.node[self.gpus[which]]):
                (stays,) = new(1)
                on_node = which[self.node[self.gpus[which]] == n]
                row(-infinity, 0.0, [(stays, 1.0), *((x[i], -1.0) for i in on_node)])
                stays_of[n].append(stays)
                self._stays.append((stays, expert, int(n)))
        self._per_node = np.bincount(self.node, minlength=nodes)
        for n in range(nodes):
            staying = [(s, 1.0) for s in stays_of[n]]
            share = (cross, float(self._per_node[n]))
            sources = [(x[i], -1.0) for i in np.flatnonzero(self.node[self.gpus] == n)]
            self._cross.append(row(0.0, infinity, [share, *staying]))
            row(0.0, infinity, [share, *staying, *sources])
        solver.Objective().SetCoefficient(comp, 1.0)
        solver.Objective().SetCoefficient(comm, weights.intra)
        solver.Objective().SetCoefficient(cross, weights.inter)
        solver.Objective().SetMinimization()
        solver.SetSolverSpecificParametersAsString("use_dual_simplex: true use_preprocessing: false")
        self._x, self._local, self._costs = x, local, (comp, comm, cross)

    def schedule_micro_batch(self, inputs: NDArray[Any]) -> CommunicationSchedule:
        """Schedule one micro-batch.

        Parameters
        ----------
        inputs
            Whole tokens that each GPU has for each expert. (E, G) [tokens]

        Raises
        ------
        SpecError
            If the inputs are of other experts or GPUs, or no whole numbers of at least 0.
        """
        given = np.asarray(inputs)
        if given.ndim != 2 or given.shape[1] != self.placement.num_gpus:
            raise SpecError(f"inputs: have shape {given.shape}; give experts x GPUs ({self.placement.num_gpus})")
        if not np.all(np.isfinite(given) & (given >= 0)):
            raise SpecError("inputs: are negative or not finite; write whole numbers of at least 0")
        loads = check_loads(given.sum(axis=1), self.placement.num_experts)
        unit = float(loads.sum()) / self.placement.num_gpus
        scaled = given / unit
        of_node = np.zeros((len(loads), len(self._per_node)))
        np.add.at(of_node.T, self.node, scaled.T)
        for row, load in zip(self._sums, (loads / unit).tolist(), strict=True):
            row.SetBounds(load, load)
        for variable, tokens in zip(self._local, scaled[self.experts, self.gpus].tolist(), strict=True):
            variable.SetUb(tokens)
        for row, tokens in zip(self._send, scaled.sum(axis=0).tolist(), strict=True):
            row.SetLb(tokens)
        for stays, expert, n in self._stays:
            stays.SetUb(float(of_node[expert, n]))
        for row, tokens in zip(self._cross, of_node.sum(axis=0).tolist(), strict=True):
            row.SetLb(tokens)
        started = time.thread_time()
        status = self._solver.Solve()
        solve_s = time.thread_time() - started
        if status != self._solver.OPTIMAL:
            raise SpecError(f"communication-aware loads: the solver ended with status {status}; check the inputs")
        x = np.maximum(np.array([v.solution_value() for v in self._x]), 0.0) * unit
        tokens = round_replica_tokens(x, loads, self.experts, self.gpus, self.placement.num_gpus)
        on_gpu = np.bincount(self.gpus, tokens, self.placement.num_gpus).astype(np.int64)
        _, comm, cross = (float(v.solution_value()) * unit for v in self._costs)
        return CommunicationSchedule(
            x, tokens, on_gpu, float(self._solver.Objective().Value()) * unit, solve_s, comm, cross
        )
