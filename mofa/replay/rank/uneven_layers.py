"""Layers whose experts get more or fewer tokens than other layers': the same allocation traces in other sizes.

What a layer frees then fits the next one only where that is no larger: the allocator's blocks are torn and new segments
taken, which layers of one size never show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mofa.cost.allocations.block_trace import BlockTrace, NewTensor, OpTrace
from mofa.cost.allocations.sequential_experts import unroll_sequential_experts
from mofa.cost.estimate import TableEstimator
from mofa.cost.kernels.kernel_selection import expert_popularity_drift
from mofa.replay.rank.routing_drift import MOST_STEPS, DriftingLayerTraces, DriftingRouters
from mofa.specs.model import ModelSpec

FloatA = NDArray[np.float64]
TracesOf = Callable[[TableEstimator], dict[str, BlockTrace]]


def rows_over_mean_by_layer(estimator: TableEstimator) -> FloatA | None:
    """Rows of every rank over the mean by layer, None where all layers are played alike. (L, ep) [-]"""
    if int(estimator.table.balancing[0]) > 0:
        return None
    ep = int(estimator.table.ep[0])
    if ep == 1 and estimator.framework.experts != "sequential":  # every rank has all experts in blocks of one size
        return None
    return estimator.loads.by_layer.get(ep)


def random_expert_shares(estimator: TableEstimator) -> FloatA | None:
    """Shares of the experts of each layer and rank where balanced tokens choose at random, None where they don't or
    every rank has all experts. (L, ep, experts of a rank) [-]

    Megatron's ``moe_router_force_load_balancing`` puts random logits in the router's place (moe_utils.py, RandomSTE):
    even in the mean, but each layer and micro-batch has other numbers.
    """
    model, routing, ep = estimator.workload.model, estimator.workload.routing, int(estimator.table.ep[0])
    even = routing.kind == "balanced" and estimator.loads.quantile_rows_over_mean.get(ep, 1.0) == 1.0
    if model.moe is None or ep == 1 or not even or estimator.framework.balances_by != "chance":
        return None
    if int(estimator.table.balancing[0]) > 0:
        return None
    return even_expert_shares(model, ep)


def even_expert_shares(model: ModelSpec, ep: int) -> FloatA:
    """Shares of experts that are equally popular. (L, ep, experts of a rank) [-]"""
    assert model.moe is not None
    experts = model.moe.num_experts
    return np.full((model.num_moe_layers, ep, experts // ep), 1.0 / experts)


def fp8_expert_row_multiple(estimator: TableEstimator) -> int:
    """The multiple to which fp8 products fill up an expert's rows, 1 where none does. [tokens]

    A rank that has all experts gets as many tokens in each micro-batch, but not as many rows that fill them up. Experts
    that are padded to a capacity get the same each time.
    """
    known = estimator.workload.routing.pad_to_capacity or int(estimator.table.balancing[0]) > 0
    fp8 = estimator.parts[0].costs.context.fp8
    return int(fp8.aligned_rows) if fp8 is not None and not known else 1


class UnevenLayerTraces:
    """Allocation traces of a strategy's layers, each sized by the tokens that its own experts get on one rank.

    Parameters
    ----------
    estimator
        Of one strategy.
    traces
        By kind of block, with the rows that memory must hold.
    traces_of
        Makes those of another estimator.
    """

    def __init__(self, estimator: TableEstimator, traces: Mapping[str, BlockTrace], traces_of: TracesOf) -> None:
        self.traces, self.estimator = traces, estimator
        ep, loads, model = int(estimator.table.ep[0]), estimator.loads, estimator.workload.model
        self.rows, drawn_evenly = rows_over_mean_by_layer(estimator), random_expert_shares(estimator)
        self.filled_up_to = fp8_expert_row_multiple(estimator)
        if self.rows is None and drawn_evenly is not None:
            self.rows = np.ones(drawn_evenly.shape[:2])
        if self.rows is None and ep == 1 and self.filled_up_to > 1 and model.moe is not None:
            # of a rank that has all experts
            self.rows, drawn_evenly = np.ones((model.num_moe_layers, 1)), even_expert_shares(model, ep)
        self.plain = {label: unroll_sequential_experts(trace) for label, trace in traces.items()}
        self.shares: FloatA | None = None
        if self.rows is None:
            return
        self.rows_over_mean = loads.quantile_rows_over_mean.get(ep, 1.0)
        routed = [layer for layer in range(model.num_layers) if model.is_moe_layer(layer)]
        self.place = {layer: i for i, layer in enumerate(routed)}
        more = replace(loads, quantile_rows_over_mean={**loads.quantile_rows_over_mean, ep: self.rows_over_mean + 1.0})
        given = estimator.workload, estimator.cluster, estimator.framework, estimator.table
        self.fuller = traces_of(TableEstimator(*given, more))
        self.more = {label: unroll_sequential_experts(trace) for label, trace in self.fuller.items()}
        self.made: dict[tuple[str, float, int], BlockTrace] = {}
        drawn = estimator.framework.experts == "sequential" or estimator.framework.balances_by == "chance"
        shares = loads.shares if drawn else None
        shares = drawn_evenly if shares is None else shares
        if shares is not None:
            self.shares = shares.reshape(len(routed), ep, -1)

    def allocation_trace_getter(self, layers: Sequence[int], emptiest: bool) -> Callable[[str, int], BlockTrace]:
        """A function from a layer's kind and number to its trace, on the rank that gets most tokens of these layers.

        With ``emptiest``, on the rank that gets fewest: its blocks are torn as well, and it may reserve more.
        """
        places = [self.place[layer] for layer in layers if layer in self.place] if self.rows is not None else []
        if self.rows is None or not places:
            return lambda label, layer: self.plain[label]
        rank = self._rank(places, emptiest)

        def of(label: str, layer: int) -> BlockTrace:
            return self._trace_of(label, self.place[layer], rank) if layer in self.place else self.plain[label]

        return of

    def _rank(self, places: Sequence[int], emptiest: bool) -> int:
        """The rank that layers, by their places, give most tokens to, or fewest."""
        assert self.rows is not None
        totals = self.rows[list(places)].sum(axis=0)
        return int(np.argmin(totals) if emptiest else np.argmax(totals))

    def drifting_layer(self, label: str, layer: int) -> DriftingLayerTraces | None:
        """A layer whose tokens move from step to step."""
        if self.rows is None or layer not in self.place or self.shares is None:
            return None
        return DriftingLayerTraces(
            self.rows_over_mean, self.plain[label], self.more[label], self.place[layer], self.filled_up_to
        )

    def drifting_routers(self, layers: Sequence[int], emptiest: bool) -> DriftingRouters | None:
        """What is drawn for the rank that these layers give most tokens to, or the ``emptiest``, where its experts run
        one after the other, chance chooses them, or fp8 fills up their rows.

        In one block for all experts of torchtitan, tokens move little: of 12 such runs (fitting half, uneven tokens)
        drawn ones change one, from 1.5 % too little reserved to 1.4 % too much.
        """
        places = [self.place[layer] for layer in layers if layer in self.place] if self.rows is not None else []
        if not places or self.shares is None:
            return None
        shares = self.shares
        estimator, table, moe = self.estimator, self.estimator.table, self.estimator.workload.model.moe
        assert moe is not None
        steps, ep = estimator.loads.steps_before, int(table.ep[0])
        tokens = int(table.micro_batch[0]) * estimator.workload.batch.seq_len / int(table.cp[0])
        copies = tokens * moe.top_k * ep * int(table.etp[0]) / (int(table.tp[0]) if bool(table.sp[0]) else 1)
        drifts = estimator.loads.drifts and np.isfinite(steps)
        spread = expert_popularity_drift(np.asarray(copies * shares)) if drifts else 0.0
        return DriftingRouters(
            shares, self._rank(places, emptiest), copies, spread, moe.top_k,
            int(steps) if np.isfinite(steps) else MOST_STEPS,
        )  # fmt: skip

    def _trace_of(self, label: str, place: int, rank: int) -> BlockTrace:
        """The trace of a layer with experts, by its place among these, on a rank."""
        assert self.rows is not None
        rows = float(self.rows[place, rank])
        key = label, rows, place if self.shares is not None else -1
        if key not in self.made:
            trace = interpolate_traces(self.traces[label], self.fuller[label], rows - self.rows_over_mean)
            of_experts = self.shares[place, rank] if self.shares is not None else np.zeros(0)
            self.made[key] = unroll_sequential_experts(
                trace, tuple((of_experts / max(of_experts.sum(), 1e-12)).tolist())
            )
        return self.made[key]


def interpolate_traces(some: BlockTrace, more: BlockTrace, fraction: float) -> BlockTrace:
    """A trace between two others, ``fraction`` [-] of the way: sizes are linear in the tokens of the experts."""

    def sized(items: tuple[NewTensor, ...], others: tuple[NewTensor, ...]) -> tuple[NewTensor, ...]:
        return tuple(
            a._replace(bytes=max(int(a.bytes + fraction * (b.bytes - a.bytes)), 0)) if a.bytes != b.bytes else a
            for a, b in zip(items, others, strict=True)
        )

    def resized(ours: tuple[OpTrace, ...], theirs: tuple[OpTrace, ...]) -> tuple[OpTrace, ...]:
        return tuple(
            a._replace(new=sized(a.new, b.new), scratch=sized(a.scratch, b.scratch))
            for a, b in zip(ours, theirs, strict=True)
        )

    return replace(
        some, forward=resized(some.forward, more.forward), backward=resized(some.backward, more.backward),
        split_backward=resized(some.split_backward, more.split_backward),
        split_backward_of_last=resized(some.split_backward_of_last, more.split_backward_of_last),
    )  # fmt: skip
