"""Layers over virtual chunks: whether each has what it must, and layouts that the framework reads."""

from __future__ import annotations

import numpy as np

from mofa.cost.block.block_cost import unique_rows
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES
from mofa.schedules.order import ranks_of_stages
from mofa.search.legality.named_check import BoolN, FloatN, JobAndMachines, degrees_text
from mofa.specs.files import shown_value
from mofa.specs.layouts.read import read_layout
from mofa.specs.strategy import StrategyTable


def layers_shortfall(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Layers that are missing for a chunk to have any, where the framework splits them. (n,)"""
    own = uses_framework_split(table)
    # the first chunk may hold the embedding alone, the last the head
    shortfall = table.pp * table.vpp - job.workload.model.num_layers - np.where(table.pp > 1, 2, 0)
    if job.framework.splits_layers != "even":  # every stage but the last is as full as may be, and none may be empty
        ends = 2 if job.framework.splits_layers == "greedy-embeddings" else 0
        items = job.workload.model.num_layers + ends
        most = -(-items // table.pp)
        needed = np.maximum(most * (table.pp - 1) + 1 + ends // 2, np.where(most < 1 + ends // 2, items + table.pp, 0))
        shortfall = np.where(table.pp > 1, np.maximum(shortfall, needed - items), shortfall)
    return np.asarray(np.where(own, np.maximum(shortfall, 0), 0), dtype=float)


def uses_framework_split(table: StrategyTable) -> BoolN:
    """Whether each row leaves the split of layers to the framework. (n,)"""
    return np.array([not text for text in table.layouts])[table.layout]


def num_refused_chunks(job: JobAndMachines, table: StrategyTable) -> FloatN:
    """Chunks of a layout that the framework refuses."""
    refused = np.zeros(len(table))
    if not any(table.layouts):
        return refused
    first, which = unique_rows([table.layout, table.pp, table.vpp, table.schedule])
    of_each = [float(_why_refused(job, table, int(i)) is not None) for i in first]
    return np.asarray(np.array(of_each)[which])


def _why_refused(job: JobAndMachines, table: StrategyTable, i: int) -> str | None:
    """Why the framework refuses a row's layout, in words; None where it does not."""
    text, model, traits = table.layout_text_of_row(i), job.workload.model, job.framework.traits
    if not text:
        return None
    if not traits.takes_layouts:
        return "is no option of it; leave layout out"
    pp, vpp = int(table.pp[i]), int(table.vpp[i])
    try:
        layout = read_layout(text, pp, vpp, model.num_layers, model.num_mtp_layers, traits.split_rule)
    except ValueError as error:
        return str(error)
    ranks, last = ranks_of_stages(pp, vpp, SCHEDULES[SCHEDULE_NAMES[int(table.schedule[i])]].placement), pp * vpp - 1
    used = {ranks[c] for c, chunk in enumerate(layout.chunks) if c in (0, last) or "t" in chunk or "m" in chunk}
    if len(used) < pp:
        return f"rank {min(set(range(pp)) - used)} would hold nothing, which is not modelled; give it a layer"
    return None


def too_many_chunks_message(job: JobAndMachines, table: StrategyTable) -> str:
    """Words for a row of too many chunks."""
    needs = "lower one of them"
    if job.framework.traits.takes_layouts:
        needs += " or give the layout that it needs (strategy.layout)"
    return f"{degrees_text(table, 'pp', 'vpp')} leaves a chunk of {job.workload.model.num_layers} layers empty; {needs}"


def refused_layout_message(job: JobAndMachines, table: StrategyTable) -> str:
    """Words for a row whose layout is refused."""
    text = shown_value(table.layout_text_of_row(0), 60)
    return f"{job.framework.name}: layout {text} with {degrees_text(table, 'pp', 'vpp')}: {_why_refused(job, table, 0)}"
