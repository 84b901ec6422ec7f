"""What a long run of each candidate expects: interval, ETTR and ledger from the facts, for all candidates at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.cost.checkpoint import CheckpointTimes
from mofa.errors import SpecError
from mofa.faults.clocks import Clock
from mofa.faults.intervals import exact_s, least_interval_s
from mofa.faults.ledger import expected_shares
from mofa.faults.rates import job_mtbf_s, rate_from_components
from mofa.faults.renewal import effective_restart_s, two_level_ettr
from mofa.faults.simulate import Kind, Level, LongRun
from mofa.faults.spares import waiting_share
from mofa.specs.faults import CheckpointSpec, FaultSpec, ReliabilitySpec, RestartSpec

FloatN = NDArray[np.float64]
IntN = NDArray[np.int64]
MAX_PATTERN = 1024
"""Most fast checkpoints from one safe one to the next. [-]"""
LEAST_QUICK = 1e-3
"""Share of failures that read a fast level, below which it is no longer stretched. [-]"""


@dataclass(frozen=True)
class Way:
    """A way back: the share of failures that take it, whether from the safe level, whether a node is replaced, and its
    seconds per candidate. (n,)"""

    share: FloatN
    safe: bool
    takes_node: bool
    seconds: FloatN


@dataclass(frozen=True)
class Outlook:
    """Expectations of n candidates; arrays (n,) unless said. [s]

    ``mtbf_s`` is the mean time between failures of the job, ``interval_s`` the compute time between checkpoints,
    ``segments`` how many of them lie between two that storage gets. ``fast_persist_s`` and ``persist_s`` are what a
    checkpoint of the fast and of the safe level takes until it can be restored; there is one level where the first is
    None. ``restart_s`` stands for all kinds; ``parts`` are the ledger's.
    """

    mtbf_s: FloatN
    interval_s: FloatN
    segments: FloatN
    block_s: FloatN
    fast_persist_s: FloatN | None
    persist_s: FloatN
    restart_s: FloatN
    parts: dict[str, FloatN]
    ways: tuple[Way, ...]
    spares: IntN
    repair_s: float

    @property
    def ettr(self) -> FloatN:
        """Productive over wall-clock time. [-]"""
        return self.parts["productive"]

    def long_run(self, i: int, work_s: float, clock: Clock | None = None) -> LongRun:
        """What :func:`mofa.faults.simulate.simulate` plays of one candidate."""
        block, safe = float(self.block_s[i]), float(self.persist_s[i])
        levels: tuple[Level, ...] = (Level(block, persist_s=safe),)
        if self.fast_persist_s is not None:
            levels = (
                Level(block, persist_s=float(self.fast_persist_s[i])),
                Level(block, every=int(self.segments[i]), persist_s=safe),
            )
        kinds = tuple(
            Kind(float(w.share[i]), float(w.seconds[i]), int(w.safe and len(levels) > 1), w.takes_node)
            for w in self.ways
        )
        interval = min(float(self.interval_s[i]), work_s)
        waits = int(self.spares[i]) or None
        return LongRun(work_s, interval, levels, kinds, clock or Clock(float(self.mtbf_s[i])), waits, self.repair_s)


def failures_per_node_day(reliability: ReliabilitySpec, gpus_per_node: int) -> float:
    """Failure rate of a node of a cluster: the profile's, per GPU. [1/(node day)]"""
    fact = reliability.failures_per_node_day
    if fact is None:
        rate = rate_from_components([(part.num_per_node, part.mttf_s.value) for part in reliability.components])
    else:
        rate = fact.value
    return rate * gpus_per_node / reliability.gpus_per_node


def job_clock(reliability: ReliabilitySpec, mtbf_s: float, num_nodes: int) -> Clock:
    """When failures of a job strike, with the profile's shape and lemons, and how well it knows its rate."""
    lemon, multiple = reliability.lemon_fraction, reliability.lemon_multiple
    return Clock(
        mtbf_s,
        shape=1.0 if reliability.shape is None else reliability.shape.value,
        num_nodes=num_nodes,
        lemon_fraction=0.0 if lemon is None else lemon.value,
        lemon_multiple=1.0 if multiple is None else multiple.value,
        counted_failures=None if reliability.counted_failures is None else reliability.counted_failures.value,
    )


def outlook(
    faults: FaultSpec, times: CheckpointTimes, step_s: ArrayLike, num_ranks: ArrayLike, num_nodes: ArrayLike,
    gpus_per_node: int, *, spares: ArrayLike | None = None, work_s: ArrayLike = np.inf, rate_factor: ArrayLike = 1.0,
    interval_s: ArrayLike | None = None,
) -> Outlook:  # fmt: skip
    """The expected course of a long run of each candidate.

    Parameters
    ----------
    faults
        Facts with reliability and restart.
    times
        Seconds of a checkpoint of each candidate. (n,)
    step_s
        One optimizer step; checkpoints fall between steps. (n,) [s]
    num_ranks, num_nodes
        Of the job, without spares; one number or one per candidate. (n,) [-]
    gpus_per_node
        GPUs of a node. [-]
    spares
        Nodes that stand by, which a failed node comes back to; 0 or None leaves replacements to the scheduler, which
        has others; one number or one per candidate. (n,) [nodes]
    work_s
        Productive time of the run, which bounds the interval. (n,) [s]
    rate_factor
        True failure rate over the profile's; one number or one per candidate. (n,) [-]
    interval_s
        Compute time between checkpoints that is kept whatever comes out, as one that was chosen before the rate was
        known; the best or the profile's where absent. (n,) [s]

    Raises
    ------
    SpecError
        If the profile lacks reliability or restart times, or asks for an interval that the run or the storage can't
        have, or for more copies than there are nodes.

    Notes
    -----
    A host copy is handed to storage as often as storage can follow, which blocks nobody: the safe level costs nothing
    beyond the fast one, and lies ``segments`` fast ones apart. The fast level's interval is the best of six: as if
    all failures read it, as if only its share p did (:func:`mofa.faults.intervals.two_level_s`: M / p), and between,
    or of the next longer ones of which a whole number fills the time that storage takes.
    """
    reliability, restart, spec = faults.reliability, faults.restart, faults.checkpoint
    if reliability is None or restart is None:
        raise SpecError(f"{faults.name}: has no {'reliability' if reliability is None else 'restart'}; add the section")
    step = np.atleast_1d(np.asarray(step_s, dtype=np.float64))
    ranks, nodes, factor = (np.asarray(x, dtype=np.float64) for x in (num_ranks, num_nodes, rate_factor))
    if spec.mode == "peer" and np.any(nodes < spec.copies):
        raise SpecError(f"{faults.name}: {spec.copies} copies of every node's states need as many nodes, not "
                        f"{float(np.min(nodes)):g}; take more nodes or another checkpoint mode")  # fmt: skip
    standing_by = np.asarray(0 if spares is None else spares, dtype=np.int64)
    zero = np.zeros(np.broadcast_shapes(step.shape, ranks.shape, nodes.shape, factor.shape, standing_by.shape))
    step, standing_by = step + zero, standing_by + zero.astype(np.int64)
    work = np.asarray(work_s, dtype=np.float64) + zero
    mtbf = job_mtbf_s(failures_per_node_day(reliability, gpus_per_node) * factor, nodes) + zero
    ways = _ways_back(reliability, restart, spec, times, ranks, standing_by > 0, mtbf * nodes, zero)
    shares, seconds = np.stack([w.share for w in ways], axis=-1), np.stack([w.seconds for w in ways], axis=-1)
    once = effective_restart_s(seconds, shares, mtbf)
    gone = sum((w.share for w in ways if w.takes_node), zero)
    waiting = np.where(standing_by > 0, waiting_share(gone / mtbf, restart.repair_s.value, standing_by), 0.0)
    blocks = spec.mode == "blocking"
    block = zero + (times.blocking_s if blocks else times.copy_s)
    persist = zero if blocks else zero + times.write_s
    fast = None
    if spec.mode in ("memory", "peer"):
        fast = zero + (times.peer_s if spec.mode == "peer" else 0.0)
    near = far = zero
    quick = zero + 1.0  # share of failures after which the level that decides the interval is read
    if fast is not None:
        near, far = (_grouped(ways, shares, seconds, mtbf, safe=safe) for safe in (False, True))
        quick = np.clip(sum((w.share for w in ways if not w.safe), zero), 0.0, 1.0)

    def course(interval: FloatN) -> tuple[FloatN, FloatN, dict[str, FloatN]]:
        """The interval, its segments between safe checkpoints, and the ledger's parts."""
        parts = expected_shares(interval, block, mtbf, once, persist, waiting)
        if fast is None:
            return interval, np.ones_like(step), parts
        segments = np.clip(np.ceil(persist / spec.in_flight / (interval + block) - 1e-9), 1, MAX_PATTERN)
        found = two_level_ettr(interval, segments, (block, block), mtbf, (near, far), quick, (fast, persist))
        productive = np.where(np.isinf(interval), 1.0, found) * (1 - waiting)
        lost = np.maximum(parts["productive"] + parts["lost"] - productive, 0.0)
        return interval, segments, {**parts, "productive": productive, "lost": lost}

    if interval_s is not None:
        interval, segments, parts = course(np.asarray(interval_s, dtype=np.float64) + zero)
    else:
        under_way = 1.0 if fast is not None else spec.in_flight
        bound = zero if blocks else least_interval_s(persist if fast is None else fast, 1.0, block, under_way)
        powers = (0.0,) if fast is None else (0.0, 0.5, 1.0)
        wanted = [exact_s(block, mtbf / np.maximum(quick, LEAST_QUICK) ** power) for power in powers]
        if fast is not None:
            wanted += [_filling(w, block, persist / spec.in_flight, step) for w in wanted]
        interval, segments, parts = _best([course(_whole_steps(faults, w, bound, step, work)) for w in wanted])
    return Outlook(
        mtbf, interval, segments, block, fast, persist, once, parts, ways, standing_by, restart.repair_s.value
    )  # fmt: skip


def _ways_back(
    reliability: ReliabilitySpec, restart: RestartSpec, spec: CheckpointSpec, times: CheckpointTimes, num_ranks: FloatN,
    has_spares: NDArray[np.bool_], node_mtbf_s: FloatN, zero: FloatN,
) -> tuple[Way, ...]:  # fmt: skip
    """Each kind's restart: detection, isolation, its path, setting up, loading, warming up.

    With peers, a node's states are gone where one of its peers fails while it is being replaced; nodes are taken to
    fail independently.
    """
    common = restart.initialise_s.value + restart.initialise_per_rank_s.value * num_ranks + restart.warm_up_s.value
    path = {
        "process": zero + restart.process_s.value,
        "network": zero + restart.reroute_s.value,
        "node": np.where(has_spares, restart.hot_spare_s.value, restart.reschedule_s.value),
    }
    host = spec.mode in ("memory", "peer")
    total = sum(kind.share.value for kind in reliability.kinds)
    ways = []
    for kind in reliability.kinds:
        share, node = zero + kind.share.value / total, kind.path == "node"
        before = kind.detect_s.value + kind.isolate_s.value + path[kind.path] + common
        if host and not node:
            ways.append(Way(share, False, node, before + times.copy_s))
        elif node and spec.mode == "peer":
            second = -np.expm1(-(spec.copies - 1) * before / node_mtbf_s)
            ways.append(Way(share * (1 - second), False, node, before + times.copy_s + times.peer_s))
            ways.append(Way(share * second, True, node, before + times.load_s))
        else:
            ways.append(Way(share, host, node, before + times.load_s))
    return tuple(ways)


def _filling(interval: FloatN, block: FloatN, persist: FloatN, step: FloatN) -> FloatN:
    """The next longer interval of which a whole number, with their checkpoints, takes what storage does. [s]"""
    with np.errstate(invalid="ignore"):
        number = np.maximum(np.floor(persist / (interval + block)), 1.0)
    return np.where(np.isinf(interval), interval, np.ceil((persist / number - block) / step - 1e-9) * step)


def _best(courses: list[tuple[FloatN, FloatN, dict[str, FloatN]]]) -> tuple[FloatN, FloatN, dict[str, FloatN]]:
    """Of several intervals with their segments and parts, per candidate those that are most productive."""
    which = np.argmax([parts["productive"] for _, _, parts in courses], axis=0)

    def chosen(columns: list[FloatN]) -> FloatN:
        return np.asarray(np.choose(which, columns))

    parts = {name: chosen([c[2][name] for c in courses]) for name in courses[0][2]}
    return chosen([c[0] for c in courses]), chosen([c[1] for c in courses]), parts


def _grouped(ways: tuple[Way, ...], shares: FloatN, seconds: FloatN, mtbf: FloatN, *, safe: bool) -> FloatN:
    """One restart time for the ways back from one level; 0 where there are none."""
    mine = np.array([w.safe == safe for w in ways])
    total = shares[:, mine].sum(axis=-1, keepdims=True)
    if not np.any(total > 0):
        return np.zeros_like(mtbf)
    some = np.where(total > 0, shares[:, mine] / np.where(total > 0, total, 1.0), 1.0 / mine.sum())
    return np.where(total[:, 0] > 0, effective_restart_s(seconds[:, mine], some, mtbf), 0.0)


def _whole_steps(faults: FaultSpec, best: FloatN, bound: FloatN, step: FloatN, work: FloatN) -> FloatN:
    """The best interval, or the one asked for, in whole steps within what storage and the run allow. [s]"""
    asked = faults.checkpoint.interval_s
    if asked is not None:
        if np.all(asked > work):
            raise SpecError(
                f"{faults.name}: checkpoint.interval_s ({asked:g} s) is longer than the run "
                f"({float(work.max()):.6g} s); shorten it"
            )
        if np.all(asked < bound):
            raise SpecError(
                f"{faults.name}: checkpoint.interval_s ({asked:g} s) is shorter than a checkpoint takes to be kept "
                f"({float(bound.min()):.4g} s); lengthen it, or give faster storage"
            )
    wanted = best if asked is None else np.full_like(step, asked)
    least = np.maximum(np.ceil(bound / step - 1e-9), 1.0) * step
    with np.errstate(invalid="ignore"):
        whole = np.maximum(np.round(np.minimum(wanted, work) / step), 1.0) * step
    return np.where(np.isinf(wanted) & np.isinf(work), np.inf, np.maximum(whole, least))
