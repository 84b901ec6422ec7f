"""The part of a space near the best rows of a search: where other numbers of GPUs are searched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mofa.cost.option_sets import options_that_blocks_read
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES
from mofa.search.costing import CostedRows
from mofa.search.legality.named_check import Verdicts
from mofa.search.space import StrategySpace, max_pipeline_stages
from mofa.specs.strategy import StrategyTable

NEAR = 20
"""The best plans that a space is near. [-]"""


def space_near_best(costed: CostedRows, reasons: Verdicts, space: StrategySpace) -> StrategySpace:
    """The part of a strategy space near the best plans of a search, with any pipeline.

    Degrees are those of :func:`space_with_degrees_near_best`; options of the framework are theirs; recomputation is
    theirs or
    none. Virtual stages are free where the best plans have some, because a pipeline of another depth splits the layers
    otherwise.
    """
    best = best_fitting_rows(costed, reasons)
    named = {best.recompute_modes[i].text for i in np.unique(best.recompute)} | {"none"}
    modes = tuple(m for m in space.recompute if m[0].text in named) or space.recompute
    chosen = {best.option_sets[i] for i in np.unique(best.options)}
    options = tuple(options for options in space.options if options in chosen) or space.options
    vpp = space.vpp if best.vpp.max() > 1 else (1,)
    return replace(_with_degrees_of(best, space), vpp=vpp, recompute=modes, options=options)


def space_with_degrees_near_best(best: StrategyTable, space: StrategySpace, num_layers: int) -> StrategySpace:
    """The space with degrees near those of :func:`best_fitting_rows`, any recomputation, stages and replicas of groups.

    Tensor and context parallelism and micro-batches go up to those of the best plans: fewer GPUs may divide the batch
    where more did not. Degrees of experts, and what blocks read of the framework's options, are theirs. Virtual stages
    and schedules that put weight gradients off are left out where the best plans could have had them and have not.
    """
    chosen = {options_that_blocks_read(best.option_sets[i]) for i in np.unique(best.options)}
    options = (
        tuple(options for options in space.options if options_that_blocks_read(options) in chosen) or space.options
    )
    near = replace(_with_degrees_of(best, space), options=options)
    if not np.any((best.pp == 1) | (2 * best.pp <= max_pipeline_stages(num_layers))):
        return near
    used = {SCHEDULE_NAMES[number] for number in best.schedule.tolist()}
    schedule = tuple(name for name in near.schedule if name in used or not SCHEDULES[name].defers_weight_gradients)
    if best.vpp.max() == 1:
        schedule = tuple(name for name in schedule if not SCHEDULES[name].has_several_chunks)
        return replace(near, vpp=(1,), schedule=schedule)
    return replace(near, schedule=schedule)


def best_fitting_rows(costed: CostedRows, reasons: Verdicts) -> StrategyTable:
    """The fitting rows with the shortest steps, :data:`NEAR` at most."""
    fits = np.flatnonzero(reasons[costed.rows] < 0)
    return costed.table.select_rows(fits[np.argsort(costed.step_s[fits])[:NEAR]])


def _with_degrees_of(best: StrategyTable, space: StrategySpace) -> StrategySpace:
    """The space up to the rows' tp, cp and micro-batches, with their degrees of experts and kinds of attention."""

    def up_to(values: tuple[int, ...], column: NDArray[np.int64]) -> tuple[int, ...]:
        return tuple(v for v in values if v <= column.max()) or values

    def like(values: tuple[int, ...], column: NDArray[np.int64]) -> tuple[int, ...]:
        return tuple(v for v in values if v in set(column.tolist())) or values

    return replace(
        space, tp=up_to(space.tp, best.tp), cp=up_to(space.cp, best.cp), ep=like(space.ep, best.ep),
        etp=like(space.etp, best.etp), micro_batch=up_to(space.micro_batch, best.micro_batch),
        cp_kind=like(space.cp_kind, best.cp_kind),
    )  # fmt: skip
