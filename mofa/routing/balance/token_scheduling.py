"""Micro-batches played through token scheduling and through what is done without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.routing.balance.baselines import (
    drop_tokens_beyond_capacity,
    eplb_fullest_gpu_tokens,
    token_flow_without_balancing,
    tokens_per_gpu_without_balancing,
)
from mofa.routing.balance.communication_lp import CommunicationScheduler
from mofa.routing.balance.flow import FlowScheduler
from mofa.routing.balance.flow_density import max_induced_density
from mofa.routing.balance.place import better_placement, is_placement_check_due
from mofa.routing.balance.replica_lp import ReplicaScheduler, TokenSchedule
from mofa.routing.balance.setup import BalanceSetup
from mofa.routing.dispatch import gpu_to_gpu_tokens, route_tokens
from mofa.routing.placement import Placement, plain_placement, shuffled_placement

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
SCHEMES = ("plain", "micro_moe", "micro_moe_adaptive", "micro_moe_random", "eplb", "capacity", "lower_bound")
ROUTED = ("plain", "micro_moe", "micro_moe_adaptive")
"""Schemes whose tokens are followed from GPU to GPU."""
FOLLOWING = ("micro_moe_adaptive", "eplb")
"""Schemes that follow the loads of the past, which the first micro-batch has none of."""


@dataclass(frozen=True)
class PlayedMicroBatches:
    """What micro-batches led to; arrays (I, L) over micro-batches and layers.

    ``max_over_mean`` maps a scheme to the fullest GPU's tokens over the mean before any were dropped; ``lower_bound``
    is the maximum induced density of the placement. ``rank_ratios`` (I, L, G) has the tokens of every GPU
    over the mean under the schemes of :data:`ROUTED`. ``gap_tokens`` is how far ``micro_moe`` is above the bound.
    ``sent`` and ``crossing`` map those schemes to the tokens that the busiest GPU sends or receives, and that the
    busiest node does per GPU, over the mean tokens of a GPU. ``solve_s`` is the solver's processor time, of
    which each layer's first is cold. ``moved`` has an entry for each new placement: the most replicas that a GPU
    received. ``settled`` is the mean of ``micro_moe_adaptive`` after the last one of each layer, None where the
    micro-batches end with one.
    """

    max_over_mean: dict[str, FloatA]
    rank_ratios: dict[str, FloatA]
    gap_tokens: FloatA
    sent: dict[str, FloatA]
    crossing: dict[str, FloatA]
    solve_s: FloatA
    dropped_fraction: float
    moved: tuple[int, ...]
    settled: float | None

    def values_without_first_micro_batch(self, values: dict[str, FloatA]) -> dict[str, FloatA]:
        """Values by scheme, without the first micro-batch of those that follow the past, if there are more."""
        return {key: value[1:] if key in FOLLOWING and len(value) > 1 else value for key, value in values.items()}

    @property
    def warm_solve_s(self) -> FloatA:
        """Solver times but each layer's first, or those where there is only one. [s]"""
        return (self.solve_s[1:] if len(self.solve_s) > 1 else self.solve_s).reshape(-1)


def play_micro_batches(
    inputs: IntA, setup: BalanceSetup, progress: Callable[[int, int], None] | None = None
) -> PlayedMicroBatches:
    """Play micro-batches through every scheme, each layer on its own.

    Parameters
    ----------
    inputs
        Tokens that each GPU of the group has for each expert. (I, L, E, G) [tokens]
    setup
        The group.
    progress
        Told layers done and in all.

    Notes
    -----
    - ``plain``: every EP group serves its own GPUs' tokens.
    - ``micro_moe``: replicas scheduled on the symmetric placement, or one's own; ``micro_moe_random`` on a random one
      (its density, rounded up); ``micro_moe_adaptive`` on one that follows the loads of the micro-batches before.
    - ``eplb``: replicas by the mean load of the micro-batches before, each with an equal part of its expert's tokens.
      The first micro-batch is plain.
    - Placements that follow loads are looked at after the first micro-batch and every ``interval`` from there
      (:func:`~mofa.routing.balance.place.is_placement_check_due`).
    - ``capacity``: plain, with every source GPU's tokens beyond ``ceil(tokens / E * capacity_factor)`` for an expert
      dropped.

    Layers keep their solver from one micro-batch to the next, as one process that schedules them would.
    """
    num, layers, num_experts, num_gpus = inputs.shape
    if (num_experts, num_gpus) != (setup.num_experts, setup.num_gpus):
        raise SpecError(
            f"tokens of {num_experts} experts and {num_gpus} GPUs, but the placement has {setup.num_experts} and "
            f"{setup.num_gpus}; pass those of the same group"
        )
    ratio = {scheme: np.zeros((num, layers)) for scheme in SCHEMES}
    rows = {scheme: np.zeros((num, layers, num_gpus), dtype=np.int64) for scheme in ROUTED}
    sent = {scheme: np.zeros((num, layers)) for scheme in ROUTED}
    crossing = {scheme: np.zeros((num, layers)) for scheme in ROUTED}
    solve_s = np.zeros((num, layers))
    plain_at = plain_placement(num_experts, num_gpus, setup.ep)
    fixed = setup.placement_of_replicas
    random = shuffled_placement(num_experts, num_gpus, setup.ep, setup.seed)
    means = inputs.sum(axis=(2, 3)) / num_gpus
    if not means.all():
        i, layer = np.argwhere(means == 0)[0]
        raise SpecError(f"micro-batch {i}, layer {layer}: has no tokens; leave it out")
    loads = inputs.sum(axis=3)
    rows["plain"] = tokens_per_gpu_without_balancing(inputs, setup)
    within_capacity = drop_tokens_beyond_capacity(inputs, setup.capacity_factor)
    ratio["capacity"] = tokens_per_gpu_without_balancing(within_capacity, setup).max(axis=-1)
    ratio["lower_bound"] = max_induced_density(fixed.has_replica, loads.astype(float))
    ratio["micro_moe_random"] = np.ceil(max_induced_density(random.has_replica, loads.astype(float)) - 1e-6)
    moved: list[int] = []
    since: list[int] = []
    for layer in range(layers):
        scheduler = _scheduler(fixed, setup)
        # one after the other and nothing between: the solver's time is its own, not that of a cold cache
        by_source = isinstance(scheduler, CommunicationScheduler)
        chosen = [
            scheduler.schedule_micro_batch(inputs[i, layer] if by_source else loads[i, layer]) for i in range(num)
        ]
        solve_s[:, layer] = [schedule.solve_s for schedule in chosen]
        adaptive = _Adaptive(fixed, setup)
        for i, schedule in enumerate(chosen):
            given = inputs[i, layer]
            followed, placement = adaptive.solve(loads[i, layer])
            rows["micro_moe"][i, layer] = schedule.gpu_tokens
            rows["micro_moe_adaptive"][i, layer] = followed.gpu_tokens
            moves = {
                "plain": token_flow_without_balancing(given, plain_at, setup.ep),
                "micro_moe": _moves(fixed, schedule, given, setup),
                "micro_moe_adaptive": _moves(placement, followed, given, setup),
            }
            for scheme, flow in moves.items():
                sent[scheme][i, layer], crossing[scheme][i, layer] = _busiest(flow, setup.gpus_per_node)
        ratio["eplb"][:, layer] = eplb_fullest_gpu_tokens(loads[:, layer], rows["plain"][:, layer], setup)
        moved += adaptive.moved
        since.append(adaptive.since)
        if progress is not None:
            progress(layer + 1, layers)
    ratio |= {scheme: tokens.max(axis=-1) for scheme, tokens in rows.items()}
    follows = ratio["micro_moe_adaptive"] / means
    settled = np.concatenate([follows[start:, layer] for layer, start in enumerate(since)])
    return PlayedMicroBatches(
        max_over_mean={scheme: values / means for scheme, values in ratio.items()},
        rank_ratios={scheme: tokens / means[..., None] for scheme, tokens in rows.items()},
        gap_tokens=ratio["micro_moe"] - ratio["lower_bound"],
        sent={scheme: values / means for scheme, values in sent.items()},
        crossing={scheme: values / means for scheme, values in crossing.items()},
        solve_s=solve_s,
        dropped_fraction=float(1.0 - within_capacity.sum() / inputs.sum()),
        moved=tuple(moved),
        settled=float(settled.mean()) if settled.size else None,
    )


def _scheduler(placement: Placement, setup: BalanceSetup) -> ReplicaScheduler | FlowScheduler | CommunicationScheduler:
    if setup.resolved_solver == "communication":
        return CommunicationScheduler(placement, setup.weights)
    return ReplicaScheduler(placement) if setup.resolved_solver == "lp" else FlowScheduler(placement)


def _moves(placement: Placement, schedule: TokenSchedule, inputs: IntA, setup: BalanceSetup) -> IntA:
    """Tokens from each GPU to each GPU under a schedule. (G, G)"""
    return gpu_to_gpu_tokens(placement, route_tokens(placement, schedule.tokens, inputs, setup.gpus_per_node))


def _busiest(flow: IntA, gpus_per_node: int) -> tuple[int, float]:
    """Most tokens that a GPU sends or receives, and that a node does, per GPU of it."""
    away = flow - np.diag(np.diag(flow))
    out = max(int(away.sum(axis=0).max()), int(away.sum(axis=1).max()))
    starts = np.arange(0, len(flow), gpus_per_node)
    nodes = np.add.reduceat(np.add.reduceat(flow, starts, axis=0), starts, axis=1)
    nodes = nodes - np.diag(np.diag(nodes))
    size = np.diff(np.append(starts, len(flow)))
    return out, float(np.maximum(nodes.sum(axis=0) / size, nodes.sum(axis=1) / size).max())


class _Adaptive:
    """Schedules on a placement that follows the loads."""

    def __init__(self, placement: Placement, setup: BalanceSetup) -> None:
        self.placement, self.setup = placement, setup
        self.scheduler = FlowScheduler(placement)
        self.past: list[IntA] = []
        self.moved: list[int] = []
        self.since = 0

    def solve(self, load: IntA) -> tuple[TokenSchedule, Placement]:
        """Schedule, and on what; afterwards, every so often, look at the placement."""
        solution = self.scheduler.schedule_micro_batch(load), self.placement
        rule = self.setup.adaptation
        self.past.append(load)
        if is_placement_check_due(len(self.past), rule.interval):
            recent = np.array(self.past[-rule.interval :], dtype=np.float64)
            new = better_placement(self.placement, recent, self.setup.experts_per_gpu, rule, self.setup.seed)
            if new is not None:
                self.moved.append(int(self.placement.num_replicas_to_receive(new).max()))
                self.placement, self.scheduler, self.since = new, FlowScheduler(new), len(self.past)
        return solution
