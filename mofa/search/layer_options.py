"""Choose one option for each layer within the memory of its pipeline stage, by CP-SAT with a lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
_NANOSECONDS, _KIB = 1e9, 1024.0


@dataclass(frozen=True)
class LayerOptions:
    """Layers, each of which takes one of the same options.

    Parameters
    ----------
    stage
        Pipeline stage of each layer. (L,)
    layer_s
        Forward and backward of a micro-batch. (L, O) [s]
    kept_bytes
        Kept between forward and backward, of all micro-batches in flight. (L, O) [B]
    live_bytes
        At the layer's own peak, beyond the kept bytes. (L, O) [B]
    stage_s
        Time of a stage outside its layers, for a micro-batch. (P,) [s]
    stage_bytes_at_layer_peak, stage_bytes_outside_layers
        What a stage holds beside its layers: at a layer's peak, and outside of layers. (P,), (P,) [B]
    limit_bytes
        Memory of a stage. [B]
    micro_batches
        Of a step. [-]
    """

    stage: IntA
    layer_s: FloatA
    kept_bytes: FloatA
    live_bytes: FloatA
    stage_s: FloatA
    stage_bytes_at_layer_peak: FloatA
    stage_bytes_outside_layers: FloatA
    limit_bytes: float
    micro_batches: int

    def stage_seconds(self, option: IntA) -> FloatA:
        """Time of each stage with these options. (P,) [s]"""
        chosen = self.layer_s[np.arange(len(option)), option]
        return np.asarray(self.stage_s + np.bincount(self.stage, chosen, len(self.stage_s)))

    def stage_bytes(self, option: IntA) -> FloatA:
        """Memory of each stage with these options. (P,) [B]"""
        rows = np.arange(len(option))
        kept_by_stage = np.bincount(self.stage, self.kept_bytes[rows, option], len(self.stage_s))
        live = np.zeros(len(self.stage_s))
        np.maximum.at(live, self.stage, self.live_bytes[rows, option])
        return np.asarray(
            kept_by_stage + np.maximum(self.stage_bytes_at_layer_peak + live, self.stage_bytes_outside_layers)
        )

    def step_s(self, option: IntA) -> float:
        """``(m - 1)`` times the slowest stage and once all of them, as under plain 1F1B. [s]"""
        each = self.stage_seconds(option)
        return float((self.micro_batches - 1) * each.max() + each.sum())


@dataclass(frozen=True)
class LayerOptionChoice:
    """The chosen options, their step, and a lower bound of all steps. (L,), [s], [s]"""

    option: IntA
    step_s: float
    bound_s: float
    optimal: bool


def choose_layer_options(problem: LayerOptions, time_limit_s: float = 10.0, seed: int = 0) -> LayerOptionChoice | None:
    """The options with the shortest step whose stages all fit; None where none fit.

    Notes
    -----
    Minimise ``(m - 1) max_r t_r + sum_r t_r`` over one option for each layer, under ``sum kept + around + max live <=
    limit`` and ``sum kept + apart <= limit`` for each stage. Times are rounded to nanoseconds, bytes up to KiB.

    Examples
    --------
    Two layers of a stage; the fast option keeps 3 KiB, the slow one 1, and 4 fit: one of each.

    >>> a = np.array
    >>> small = LayerOptions(a([0, 0]), a([[1.0, 2.0]] * 2), a([[3072.0, 1024.0]] * 2), np.zeros((2, 2)), np.zeros(1),
    ...                      np.zeros(1), np.zeros(1), 4096.0, 1)
    >>> choose_layer_options(small).step_s
    3.0
    """
    from ortools.sat.python import cp_model

    model: Any = cp_model.CpModel()
    layers, options = problem.layer_s.shape
    pick = [[model.new_bool_var("") for _ in range(options)] for _ in range(layers)]
    for row in pick:
        model.add_exactly_one(row)
    nanoseconds = np.round(problem.layer_s * _NANOSECONDS).astype(np.int64)
    kept_kib, live = (np.ceil(b / _KIB).astype(np.int64) for b in (problem.kept_bytes, problem.live_bytes))
    limit = int(problem.limit_bytes // _KIB)
    longest = int(nanoseconds.max(axis=1).sum() + np.round(problem.stage_s * _NANOSECONDS).sum()) + 1
    slowest, total = model.new_int_var(0, longest, ""), []
    for r in range(len(problem.stage_s)):
        on_stage = [(i, o) for i in np.flatnonzero(problem.stage == r) for o in range(options)]
        time = sum(int(nanoseconds[i, o]) * pick[i][o] for i, o in on_stage) + round(problem.stage_s[r] * _NANOSECONDS)
        model.add(slowest >= time)
        total.append(time)
        chosen_kib = sum(int(kept_kib[i, o]) * pick[i][o] for i, o in on_stage)
        model.add(chosen_kib + int(np.ceil(problem.stage_bytes_outside_layers[r] / _KIB)) <= limit)
        around = int(np.ceil(problem.stage_bytes_at_layer_peak[r] / _KIB))
        for i, o in on_stage:
            model.add(chosen_kib + around + int(live[i, o]) <= limit).only_enforce_if(pick[i][o])
    model.minimize((problem.micro_batches - 1) * slowest + sum(total))
    solver: Any = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # else Ctrl-C ends the process at once from the first program on
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    option = np.array([[solver.value(x) for x in row].index(1) for row in pick])
    bound = float(solver.best_objective_bound) / _NANOSECONDS
    step = problem.step_s(option)
    return LayerOptionChoice(option, step, min(bound, step), status == cp_model.OPTIMAL)
