"""The linear program of replica loads: how many tokens of each expert every GPU that holds it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.routing.balance.replica_program import ReplicaProgram
from mofa.routing.balance.rounding import round_replica_tokens
from mofa.routing.placement import Placement

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
BoolA = NDArray[np.bool_]
UNLIKE = 0.2
"""Part of the tokens that must have changed experts for a program to be built anew. [-]"""
SPARE = 2.0
"""How much more than its tokens an expert's open replicas must hold, were they alone on their GPUs. [-]"""
AT_ONCE = 16
"""Experts that open a replica at a time, those first for which it is worth most: a small program is a fast one."""
_TOLERANCE = 1e-9
"""Of the optimum, relative."""


@dataclass(frozen=True)
class TokenSchedule:
    """Tokens of each replica in one micro-batch of one layer.

    ``fractional`` and ``tokens`` (R,) follow :attr:`~mofa.routing.placement.Placement.experts_and_gpus`; ``gpu_tokens``
    (G,) are the whole tokens of the GPUs, ``optimum`` the program's objective [tokens]; ``solve_s`` is the processor
    time of the solver, which has one thread.
    """

    fractional: FloatA
    tokens: IntA
    gpu_tokens: IntA
    optimum: float
    solve_s: float


class ReplicaScheduler:
    """Schedules tokens over replicas by the linear program of one placement, gone on with from micro-batch to
    micro-batch.

    Parameters
    ----------
    placement
        Which GPUs hold which experts.

    Notes
    -----
    ``minimize m`` subject to ``sum over replicas of e: x = load_e``, ``sum over GPU g: x <= m``, ``x >= 0``. Few of
    many replicas are needed at a time, so that the program is solved over those that are *open*
    (:func:`replicas_that_program_begins_with`)
    and the others have nothing (column generation): a GPU's ``price`` is what one more token on it adds to ``m``, and
    as long as an expert has a closed replica on a cheaper GPU than any of its open ones, that replica is opened. Where
    there is none, prices prove the optimum of the whole: ``m = sum of load x cheapest price``. From then on the
    basis of the micro-batch before is gone on from (:class:`ReplicaProgram`). A program is built anew where loads are
    unlike those of the micro-batch before. Tokens are in units of the mean load of a GPU.

    The optimum is the maximum induced density (:mod:`mofa.routing.induced_density`).

    References
    ----------
    MicroMoE, arXiv 2511.16947, section 5.1, LPP 1, which uses HiGHS; rounding is not discussed there. Column
    generation: Dantzig and Wolfe 1960, "Decomposition principle for linear programs", doi:10.1287/opre.8.1.101.

    Examples
    --------
    Three GPUs in a row: the expert of the first two has 6 tokens, that of the last two 3.

    >>> scheduler = ReplicaScheduler(Placement(np.array([[1, 1, 0], [0, 1, 1]])))
    >>> scheduler.schedule_micro_batch(np.array([6, 3])).gpu_tokens.tolist()
    [3, 3, 3]
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.experts, self.gpus = placement.experts_and_gpus
        self._open = self._base = np.zeros(len(self.experts), dtype=bool)
        self._program: ReplicaProgram | None = None
        self._before = np.zeros(placement.num_experts)

    def schedule_micro_batch(self, loads: NDArray[Any]) -> TokenSchedule:
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
        checked = check_loads(loads, self.placement.num_experts)
        unit = float(checked.sum()) / self.placement.num_gpus
        scaled = checked / unit
        program = self._program
        if program is None or np.abs(scaled - self._before).sum() > UNLIKE * scaled.sum():
            program = self._build(*replicas_that_program_begins_with(self.placement, scaled))
        self._before = scaled
        solve_s = 0.0
        while True:
            solution = program.solve(scaled)
            solve_s += solution.solve_s
            better = self._better(solution.price, solution.fullest_gpu_tokens, scaled)
            if not better.any():
                break
            program = self._build(self._open | better, self._base)
        x = np.zeros(len(self.experts))
        x[self._open] = np.maximum(solution.replica_tokens, 0.0) * unit
        tokens = round_replica_tokens(x, checked, self.experts, self.gpus, self.placement.num_gpus)
        on_gpu = np.bincount(self.gpus, tokens, self.placement.num_gpus).astype(np.int64)
        return TokenSchedule(x, tokens, on_gpu, solution.fullest_gpu_tokens * unit, solve_s)

    def _build(self, open_: BoolA, base: BoolA) -> ReplicaProgram:
        self._open, self._base = open_, base
        self._program = ReplicaProgram(self.experts[open_], self.gpus[open_], base[open_], self.placement.num_gpus)
        return self._program

    def _better(self, price: FloatA, m: float, scaled: FloatA) -> BoolA:
        """Closed replicas to open: those on the cheapest GPU of an expert, where it is cheaper than the open ones. (R,)

        None where the prices already prove ``m``.
        """
        gpu_price = price[self.gpus]
        cheapest, cheapest_open = np.full((2, len(scaled)), np.inf)
        np.minimum.at(cheapest, self.experts, gpu_price)
        if m <= float(scaled @ cheapest) * (1 + _TOLERANCE):
            return np.zeros(len(gpu_price), dtype=bool)
        np.minimum.at(cheapest_open, self.experts[self._open], gpu_price[self._open])
        gain = np.where(cheapest < cheapest_open - _TOLERANCE, scaled * (cheapest_open - cheapest), 0.0)
        most = np.argsort(-gain, kind="stable")[:AT_ONCE]
        opens = np.isin(self.experts, most[gain[most] > 0])
        return np.asarray(~self._open & opens & (gpu_price <= cheapest[self.experts]))


def replicas_that_program_begins_with(placement: Placement, loads: FloatA) -> tuple[BoolA, BoolA]:
    """Replicas that a program begins with, and of each expert the one that all its tokens begin on.

    Parameters
    ----------
    placement
        Which GPUs hold which experts.
    loads
        Tokens of the experts in units of a GPU's mean. (E,) [-]

    Returns
    -------
    tuple[BoolA, BoolA]
        (R,) of truth values, twice.

    Notes
    -----
    From the busiest expert down: of its GPUs the least filled, enough to take :data:`SPARE` times its tokens and one
    more, and its tokens are poured over them up to one level.

    Examples
    --------
    The first expert opens three replicas; the second begins on the GPU that is left empty.

    >>> placed = Placement(np.array([[1, 1, 1, 1], [1, 0, 0, 1]]))
    >>> open_, base = replicas_that_program_begins_with(placed, np.array([0.9, 0.3]))
    >>> open_.tolist(), base.tolist()
    ([True, True, True, False, True, True], [True, False, False, False, False, True])
    """
    experts, gpus = placement.experts_and_gpus
    count = np.bincount(experts, minlength=placement.num_experts)
    first = (np.cumsum(count) - count).tolist()
    hosts = [part.tolist() for part in np.split(gpus, first[1:])]
    needed = np.minimum(count, np.ceil(SPARE * loads).astype(np.int64) + 1).tolist()
    level = [0.0] * placement.num_gpus
    open_, base = np.zeros(len(experts), dtype=bool), np.zeros(len(experts), dtype=bool)
    for expert in np.argsort(-loads, kind="stable").tolist():
        filled = sorted((level[gpu], k) for k, gpu in enumerate(hosts[expert]))
        chosen = [k for _, k in filled[: needed[expert]]]
        base[first[expert] + chosen[0]] = True
        open_[[first[expert] + k for k in chosen]] = True
        _pour(level, [hosts[expert][k] for k in chosen], float(loads[expert]))
    return open_, base


def _pour(level: list[float], gpus: list[int], tokens: float) -> None:
    """Tokens onto GPUs in ascending order of their levels, so that those that get any end at one level."""
    total = tokens
    for count, gpu in enumerate(gpus, start=1):
        total += level[gpu]
        if count == len(gpus) or total / count <= level[gpus[count]]:
            for filled in gpus[:count]:
                level[filled] = total / count
            return


def check_loads(loads: NDArray[Any], num_experts: int) -> IntA:
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
