"""Micro-batches played through token scheduling and through what is done without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.routing.balance.communication_lp import CommunicationScheduler, Weights
from mofa.routing.balance.flow import FlowScheduler
from mofa.routing.balance.flow_density import max_density
from mofa.routing.balance.place import Adaptation, replace_if_worse
from mofa.routing.balance.replica_lp import ReplicaScheduler
from mofa.routing.dispatch import route_tokens, traffic
from mofa.routing.placement import Placement, expert_parallel, packed, shuffled, slots_of, symmetric

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
Solver = Literal["auto", "lp", "flow", "communication"]
MAX_CELLS = 2**26
MAX_EXPERTS = 8192
LP_GPUS = 64
SCHEMES = ("plain", "micro_moe", "micro_moe_adaptive", "micro_moe_random", "eplb", "capacity", "lower_bound")


@dataclass(frozen=True)
class Setup:
    """A group of GPUs that merges whole expert-parallel groups, and how its tokens are scheduled.

    ``solver`` ``auto`` is the linear program on up to 64 GPUs, where it goes on from the micro-batch before within a
    millisecond (benchmarks/balance_speed.py), and flows beyond; both have the same optimum.
    ``communication`` is the program that weighs what is sent. ``capacity_factor`` is that of the baseline that drops.
    """

    num_experts: int
    num_gpus: int
    ep: int
    gpus_per_node: int = 8
    solver: Solver = "auto"
    weights: Weights = field(default_factory=Weights)
    adaptation: Adaptation = field(default_factory=Adaptation)
    capacity_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_experts > MAX_EXPERTS:
            raise SpecError(f"experts ({self.num_experts}): more than {MAX_EXPERTS} are not scheduled; give fewer")
        slots_of(self.num_experts, self.num_gpus, self.ep)
        if self.num_gpus == self.ep:
            raise SpecError(
                f"gpus ({self.num_gpus}) must be above ep ({self.ep}): replicas need two EP groups to merge"
            )
        if self.slots < 2:
            raise SpecError(f"ep ({self.ep}): a GPU holds one of {self.num_experts} experts, and needs two; lower ep")
        if not self.capacity_factor > 0:
            raise SpecError(f"capacity factor ({self.capacity_factor:g}) must be above 0")

    @property
    def merged(self) -> int:
        """Expert-parallel groups in the group. [-]"""
        return self.num_gpus // self.ep

    @property
    def slots(self) -> int:
        """Experts that a GPU holds. [-]"""
        return self.num_experts // self.ep

    @property
    def resolved_solver(self) -> str:
        """What ``auto`` stands for."""
        if self.solver != "auto":
            return self.solver
        return "lp" if self.num_gpus <= LP_GPUS else "flow"


@dataclass(frozen=True)
class Played:
    """What micro-batches led to; arrays (I, L) over micro-batches and layers.

    ``max_over_mean`` maps a scheme to the fullest GPU's tokens over the mean before any were dropped; ``lower_bound``
    is the maximum induced density of the symmetric placement. ``rank_ratios`` (I, L, G) has the tokens of every GPU
    over the mean under ``plain`` and ``micro_moe``. ``gap_tokens`` is how far ``micro_moe`` is above it.
    ``sent`` and ``crossing`` map ``plain`` and ``micro_moe`` to the tokens that the busiest GPU sends or receives, and
    that the busiest node does per GPU, over the mean tokens of a GPU. ``solve_s`` is the solver's processor time, of
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

    @property
    def warm_solve_s(self) -> FloatA:
        """Solver times but each layer's first, or those where there is only one. [s]"""
        return (self.solve_s[1:] if len(self.solve_s) > 1 else self.solve_s).reshape(-1)


def draw_inputs(shares: FloatA, tokens_per_gpu: int, num_gpus: int, seed: int = 0) -> IntA:
    """Tokens that every GPU has for every expert, drawn independently. (I, L, E) -> (I, L, E, G) [tokens]

    >>> drawn = draw_inputs(np.full((2, 1, 4), 0.25), 100, 3)
    >>> drawn.shape, drawn.sum(axis=2).tolist()
    ((2, 1, 4, 3), [[[100, 100, 100]], [[100, 100, 100]]])
    """
    if tokens_per_gpu < 1:
        raise SpecError(f"tokens ({tokens_per_gpu}) of a GPU must be at least 1; route more")
    if shares.size * num_gpus > MAX_CELLS:
        raise SpecError(
            f"{shares.shape[0]} micro-batches of {shares.shape[1]} layers, {shares.shape[2]} experts and {num_gpus} "
            f"GPUs are more than {MAX_CELLS} numbers; play fewer micro-batches"
        )
    rng = np.random.default_rng(seed)
    sizes = (*shares.shape[:2], num_gpus)
    drawn = rng.multinomial(tokens_per_gpu, np.broadcast_to(shares[:, :, None], (*sizes, shares.shape[2])))
    return np.asarray(np.moveaxis(drawn, 3, 2))


def split_inputs(loads: IntA, num_gpus: int, seed: int = 0) -> IntA:
    """Counted tokens of the experts, dealt out to source GPUs at random. (I, L, E) -> (I, L, E, G) [tokens]

    >>> split_inputs(np.array([[[6, 2]]]), 2).sum(axis=-1).tolist()
    [[[6, 2]]]
    """
    if loads.size * num_gpus > MAX_CELLS:
        raise SpecError(f"{loads.shape[0]} iterations on {num_gpus} GPUs are more than {MAX_CELLS} numbers; keep fewer")
    rng = np.random.default_rng(seed)
    return np.asarray(rng.multinomial(loads, np.full(num_gpus, 1.0 / num_gpus)))


def play(inputs: IntA, setup: Setup, progress: Callable[[int, int], None] | None = None) -> Played:
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
    - ``micro_moe``: replicas scheduled on the symmetric placement; ``micro_moe_random`` on a random one (its density,
      rounded up); ``micro_moe_adaptive`` on one that follows the loads of the micro-batches before.
    - ``eplb``: replicas by the mean load of the micro-batches before, placed anew every ``interval``; each replica gets
      an equal part of its expert's tokens. Plain until there is a past.
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
    sent: dict[str, FloatA] = {scheme: np.zeros((num, layers)) for scheme in ("plain", "micro_moe")}
    crossing: dict[str, FloatA] = {scheme: np.zeros((num, layers)) for scheme in ("plain", "micro_moe")}
    solve_s, rows = np.zeros((num, layers)), np.zeros((num, layers, num_gpus))
    plain_at = expert_parallel(num_experts, num_gpus, setup.ep)
    fixed = symmetric(num_experts, num_gpus, setup.ep, setup.seed)
    random = shuffled(num_experts, num_gpus, setup.ep, setup.seed)
    means = inputs.sum(axis=(2, 3)) / num_gpus
    if not means.all():
        i, layer = np.argwhere(means == 0)[0]
        raise SpecError(f"micro-batch {i}, layer {layer}: has no tokens; leave it out")
    loads = inputs.sum(axis=3)
    ratio["plain"], plain_rows = _plain(inputs, setup)
    kept = np.minimum(inputs, np.ceil(inputs.sum(axis=2, keepdims=True) / num_experts * setup.capacity_factor))
    ratio["capacity"] = _plain(kept.astype(np.int64), setup)[0]
    ratio["lower_bound"] = max_density(fixed.hosts, loads.astype(float))
    ratio["micro_moe_random"] = np.ceil(max_density(random.hosts, loads.astype(float)) - 1e-6)
    moved: list[int] = []
    after: list[FloatA] = []
    for layer in range(layers):
        scheduler = _scheduler(fixed, setup)
        # one after the other and nothing between: the solver's time is its own, not that of a cold cache
        whole = isinstance(scheduler, CommunicationScheduler)
        chosen = [scheduler.solve(inputs[i, layer] if whole else loads[i, layer]) for i in range(num)]
        solve_s[:, layer] = [schedule.solve_s for schedule in chosen]
        adaptive = _Adaptive(fixed, setup)
        for i, schedule in enumerate(chosen):
            ratio["micro_moe"][i, layer] = schedule.gpu_tokens.max()
            rows[i, layer] = schedule.gpu_tokens
            flow = route_tokens(fixed, schedule.tokens, inputs[i, layer], setup.gpus_per_node)
            plain_flow = _plain_flow(inputs[i, layer], plain_at, setup)
            for scheme, moves in (("plain", plain_flow), ("micro_moe", traffic(fixed, flow))):
                sent[scheme][i, layer], crossing[scheme][i, layer] = _busiest(moves, setup.gpus_per_node)
            ratio["micro_moe_adaptive"][i, layer] = adaptive.solve(loads[i, layer])
        ratio["eplb"][:, layer] = _eplb(loads[:, layer], plain_rows[:, layer], setup)
        moved += adaptive.moved
        after.append((ratio["micro_moe_adaptive"][:, layer] / means[:, layer])[adaptive.since :])
        if progress is not None:
            progress(layer + 1, layers)
    settled = np.concatenate(after)
    return Played(
        max_over_mean={scheme: values / means for scheme, values in ratio.items()},
        rank_ratios={"plain": plain_rows / means[..., None], "micro_moe": rows / means[..., None]},
        gap_tokens=ratio["micro_moe"] - ratio["lower_bound"],
        sent={scheme: values / means for scheme, values in sent.items()},
        crossing={scheme: values / means for scheme, values in crossing.items()},
        solve_s=solve_s,
        dropped_fraction=float(1.0 - kept.sum() / inputs.sum()),
        moved=tuple(moved),
        settled=float(settled.mean()) if settled.size else None,
    )


def _scheduler(placement: Placement, setup: Setup) -> ReplicaScheduler | FlowScheduler | CommunicationScheduler:
    if setup.resolved_solver == "communication":
        return CommunicationScheduler(placement, setup.weights)
    return ReplicaScheduler(placement) if setup.resolved_solver == "lp" else FlowScheduler(placement)


def _plain(inputs: IntA, setup: Setup) -> tuple[FloatA, IntA]:
    """Tokens of the fullest GPU, and of all, where every EP group keeps to itself. (I, L), (I, L, G)"""
    shape = inputs.shape
    groups = inputs.reshape(*shape[:3], setup.merged, setup.ep).sum(axis=-1)
    ranks = groups.reshape(*shape[:2], setup.ep, setup.slots, setup.merged).sum(axis=3)
    on_gpu = np.swapaxes(ranks, 2, 3).reshape(*shape[:2], setup.num_gpus)
    return on_gpu.max(axis=-1).astype(float), on_gpu


def _plain_flow(inputs: IntA, placement: Placement, setup: Setup) -> IntA:
    """Tokens from each GPU to each GPU under plain expert parallelism. (G, G)"""
    gpus = np.arange(setup.num_gpus)
    same = gpus[:, None] // setup.ep == gpus // setup.ep
    return np.asarray((inputs.T @ placement.copies) * same)


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

    def __init__(self, placement: Placement, setup: Setup) -> None:
        self.placement, self.setup = placement, setup
        self.scheduler = FlowScheduler(placement)
        self.past: list[IntA] = []
        self.moved: list[int] = []
        self.done, self.since = 0, 0

    def solve(self, load: IntA) -> int:
        """Tokens of the fullest GPU; afterwards, every so often, look at the placement."""
        fullest = int(self.scheduler.solve(load).gpu_tokens.max())
        rule = self.setup.adaptation
        self.past.append(load)
        self.done += 1
        if len(self.past) >= rule.interval:
            recent = np.array(self.past, dtype=np.float64)
            new = replace_if_worse(self.placement, recent, self.setup.slots, rule, self.setup.seed)
            if new is not None:
                self.moved.append(int(self.placement.moved(new).max()))
                self.placement, self.scheduler, self.since = new, FlowScheduler(new), self.done
            self.past.clear()
        return fullest


def _eplb(loads: IntA, plain_rows: IntA, setup: Setup) -> FloatA:
    """Tokens of the fullest GPU under EPLB-style replicas of one layer. (I, E), (I, G) -> (I,)"""
    every = setup.adaptation.interval
    fullest = plain_rows.max(axis=-1).astype(np.float64)
    for start in range(every, len(loads), every):
        placed = packed(loads[start - every : start].mean(axis=0), setup.num_gpus, setup.slots)
        parts = loads[start : start + every] / placed.copies.sum(axis=1)
        fullest[start : start + every] = (parts @ placed.copies).max(axis=-1)
    return np.asarray(fullest)
