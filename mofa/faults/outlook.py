"""What a long run of each candidate expects: interval, ETTR and ledger from the facts, for all candidates at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mofa.cost.checkpoint import CheckpointTimes
from mofa.errors import SpecError
from mofa.faults.closed_forms.checkpoint_levels import best_checkpoint_pattern, ledger_shares_of_levels
from mofa.faults.closed_forms.intervals import exact_interval_s, least_interval_s
from mofa.faults.closed_forms.renewal import effective_restart_s
from mofa.faults.closed_forms.two_levels import two_level_ettr
from mofa.faults.failures.clocks import FailureClock
from mofa.faults.failures.rates import failures_per_node_day_of_components, job_mtbf_s
from mofa.faults.ledger import expected_ledger_shares
from mofa.faults.replicas import ReplicaAbsence, mean_missing_nodes
from mofa.faults.simulate import MAX_SPACING, LongRunToSimulate, SimulatedCheckpointLevel, SimulatedFailureKind
from mofa.faults.spares import waiting_share
from mofa.specs.faults import LEVELS, CheckpointSpec, FaultSpec, Place, RecoveryPath, ReliabilitySpec, RestartSpec

FloatN = NDArray[np.float64]
IntN = NDArray[np.int64]
LEAST_QUICK = 1e-3
"""Share of failures that read a fast level, below which it is no longer stretched. [-]"""


@dataclass(frozen=True)
class RestartPath:
    """A way back: the share of failures that take it, the lowest level of checkpoints that survives, whether a node is
    replaced, and its seconds per candidate. (n,)"""

    share: FloatN
    level: int
    takes_node: bool
    seconds: FloatN


@dataclass(frozen=True)
class CheckpointLevelTimes:
    """A level of checkpoints of n candidates: where it is kept, for how long one blocks computing and from then until
    it can be restored, and behind every how manieth segment. (n,) [s], [-]"""

    where: Place
    block_s: FloatN
    persist_s: FloatN
    every: FloatN


@dataclass(frozen=True)
class LongRunOutlook:
    """What to expect of a long run of n candidates; arrays (n,) unless said. [s]

    ``mtbf_s`` is the mean time between failures of the job, ``interval_s`` the compute time between checkpoints, of
    whatever level; ``levels`` begin with the most frequent. ``restart_s`` stands for all kinds; ``parts`` are the
    ledger's.
    """

    mtbf_s: FloatN
    interval_s: FloatN
    levels: tuple[CheckpointLevelTimes, ...]
    restart_s: FloatN
    parts: dict[str, FloatN]
    restart_paths: tuple[RestartPath, ...]
    spares: IntN
    repair_s: float
    absence: ReplicaAbsence | None = None
    """Where other replicas go on; None where all restart."""

    @property
    def ettr(self) -> FloatN:
        """Productive over wall-clock time. [-]"""
        return self.parts["productive"]

    def run_to_simulate(self, candidate: int, work_s: float, clock: FailureClock | None = None) -> LongRunToSimulate:
        """What :func:`mofa.faults.simulate.simulate_long_runs` plays of one candidate."""
        if self.absence is not None and self.absence.num_replicas[candidate] > 1:
            cost, step = (
                float(self.absence.cost_per_failure_s[candidate]),
                min(float(self.absence.step_s[candidate]), work_s),
            )
            return LongRunToSimulate(
                work_s,
                step,
                (SimulatedCheckpointLevel(0.0),),
                (SimulatedFailureKind(1.0, cost),),
                clock or FailureClock(float(self.mtbf_s[candidate])),
            )
        levels = tuple(
            SimulatedCheckpointLevel(
                float(x.block_s[candidate]), int(x.every[candidate]), float(x.persist_s[candidate])
            )
            for x in self.levels
        )
        kinds = tuple(
            SimulatedFailureKind(float(w.share[candidate]), float(w.seconds[candidate]), w.level, w.takes_node)
            for w in self.restart_paths
        )
        interval = min(float(self.interval_s[candidate]), work_s)
        waits = int(self.spares[candidate]) or None
        return LongRunToSimulate(
            work_s, interval, levels, kinds, clock or FailureClock(float(self.mtbf_s[candidate])), waits, self.repair_s
        )


def failures_per_node_day(reliability: ReliabilitySpec, gpus_per_node: int) -> float:
    """Failure rate of a node of a cluster: the profile's, per GPU. [1/(node day)]"""
    fact = reliability.failures_per_node_day
    if fact is None:
        rate = failures_per_node_day_of_components(
            [(part.num_per_node, part.mttf_s.value) for part in reliability.components]
        )
    else:
        rate = fact.value
    return rate * gpus_per_node / reliability.gpus_per_node


def failure_clock(reliability: ReliabilitySpec, mtbf_s: float, num_nodes: int) -> FailureClock:
    """When failures of a job strike, with the profile's shape and lemons, and how well it knows its rate."""
    lemon, multiple = reliability.lemon_fraction, reliability.lemon_multiple
    return FailureClock(
        mtbf_s,
        shape=1.0 if reliability.shape is None else reliability.shape.value,
        num_nodes=num_nodes,
        lemon_fraction=0.0 if lemon is None else lemon.value,
        lemon_multiple=1.0 if multiple is None else multiple.value,
        counted_failures=None if reliability.counted_failures is None else reliability.counted_failures.value,
    )


def long_run_outlook(
    faults: FaultSpec, times: CheckpointTimes, step_s: ArrayLike, num_ranks: ArrayLike, num_nodes: ArrayLike,
    gpus_per_node: int, *, spares: ArrayLike | None = None, work_s: ArrayLike = np.inf, rate_factor: ArrayLike = 1.0,
    interval_s: ArrayLike | None = None, every: Sequence[ArrayLike] | None = None, num_replicas: ArrayLike = 1,
) -> LongRunOutlook:  # fmt: skip
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
    every
        Segments between checkpoints of each level that are kept with it. (levels, n) [-]
    num_replicas
        Data-parallel replicas that each hold all states, for ``recovery: replica``; with 1 all restart. (n,) [-]

    Raises
    ------
    SpecError
        If the profile lacks reliability or restart times, or asks for an interval that the run or the storage can't
        have, or for more copies than there are nodes.

    Notes
    -----
    A host copy is handed to storage as often as storage can follow, which blocks nobody: the safe level costs nothing
    beyond the fast one, and lies ``segments`` fast ones apart. The fast level's interval is the best of nine: as if
    all failures read it, as if only its share p did
    (:func:`mofa.faults.closed_forms.intervals.two_level_intervals_s`: M / p),
    and between, or of the ones next to these of which a whole number fills the time that storage takes. Where computing
    waits for every copy, the pattern of levels is that of
    :func:`mofa.faults.closed_forms.checkpoint_levels.best_checkpoint_pattern`.
    """
    reliability, restart, spec = faults.reliability, faults.restart, faults.checkpoint
    if reliability is None or restart is None:
        raise SpecError(f"{faults.name}: has no {'reliability' if reliability is None else 'restart'}; add the section")
    step = np.atleast_1d(np.asarray(step_s, dtype=np.float64))
    ranks, nodes, factor, copies = (
        np.asarray(x, dtype=np.float64) for x in (num_ranks, num_nodes, rate_factor, num_replicas)
    )
    if spec.least_nodes_for_copies > 1 and np.any(nodes < spec.least_nodes_for_copies):
        raise SpecError(f"{faults.name}: {spec.copies} copies of every node's states need as many nodes, not "
                        f"{float(np.min(nodes)):g}; take more nodes or another checkpoint mode")  # fmt: skip
    standing_by = np.asarray(0 if spares is None else spares, dtype=np.int64)
    columns = (step, ranks, nodes, factor, copies, standing_by)
    zero = np.zeros(np.broadcast_shapes(*(column.shape for column in columns)))
    step, standing_by = step + zero, standing_by + zero.astype(np.int64)
    work = np.asarray(work_s, dtype=np.float64) + zero
    mtbf = job_mtbf_s(failures_per_node_day(reliability, gpus_per_node) * factor, nodes) + zero
    restart_paths = _restart_paths(reliability, restart, spec, times, ranks, standing_by > 0, mtbf * nodes, zero)
    shares, seconds = (
        np.stack([w.share for w in restart_paths], axis=-1),
        np.stack([w.seconds for w in restart_paths], axis=-1),
    )
    once = effective_restart_s(seconds, shares, mtbf)
    gone = sum((w.share for w in restart_paths if w.takes_node), zero)
    waiting = np.where(standing_by > 0, waiting_share(gone / mtbf, restart.repair_s.value, standing_by), 0.0)
    facts = _Facts(faults, times, step, work, mtbf, restart_paths, shares, seconds, once, waiting)
    absence = None
    if faults.recovery == "replica":
        # those that share a node fail together
        absence = _absence(facts, ranks, np.minimum(copies, np.maximum(nodes, 1.0)) + zero, standing_by)
        interval, levels, parts = _writing_behind(facts, interval_s, absence)
    elif spec.waits_for_copies and len(LEVELS[spec.mode]) > 1:
        interval, levels, parts = _waiting_for_levels(facts, interval_s, every)
    else:
        interval, levels, parts = _writing_behind(facts, interval_s)
    return LongRunOutlook(
        mtbf, interval, levels, once, parts, restart_paths, standing_by, restart.repair_s.value, absence
    )


def _absence(facts: _Facts, num_ranks: FloatN, num_replicas: FloatN, spares: IntN) -> ReplicaAbsence:
    """How long a replica that failed is away, and all stand still for it.

    All notice the failure, and set up their communicators without the replica and again with it, which takes what it
    does in a restart. The replica goes the way of its kind of failure, sets itself up and reads a node's states, which
    are its own share of the checkpoint times the replicas, over the NICs from a replica that went on. With spares all
    gone it is away until a node is repaired; others go on failing meanwhile.
    """
    reliability, restart, times = facts.faults.reliability, facts.faults.restart, facts.times
    assert reliability is not None and restart is not None
    set_up = restart.initialise_s.value + restart.initialise_per_rank_s.value * num_ranks
    states = times.peer_s / (facts.faults.checkpoint.copies - 1) * num_replicas
    detect = sum(kind.share.value * kind.detect_s.value for kind in reliability.kinds)
    away = sum(
        kind.share.value * (kind.isolate_s.value + _path_s(restart, spares > 0)[kind.path])
        for kind in reliability.kinds
    )
    gone = sum(kind.share.value for kind in reliability.kinds if kind.path == "node")
    with np.errstate(invalid="ignore"):
        short = np.where(spares > 0, mean_missing_nodes(gone / facts.mtbf_s * restart.repair_s.value, spares), 0.0)
        queued_s = np.where(short > 0, short * facts.mtbf_s, 0.0)  # Little's law: nodes short over failures per second
    own = restart.initialise_s.value + restart.initialise_per_rank_s.value * num_ranks / num_replicas
    zero = np.zeros_like(facts.step_s)
    back = zero + away + own + restart.warm_up_s.value + np.maximum(states, times.copy_s * num_replicas) + queued_s
    return ReplicaAbsence(zero + detect + 2 * set_up, back, facts.step_s, num_replicas)


def _path_s(restart: RestartSpec, has_spares: NDArray[np.bool_]) -> dict[RecoveryPath, FloatN]:
    """What each path takes. [s]"""
    return {
        "process": np.asarray(restart.process_s.value),
        "network": np.asarray(restart.reroute_s.value),
        "node": np.where(has_spares, restart.hot_spare_s.value, restart.reschedule_s.value),
    }


@dataclass(frozen=True)
class _Facts:
    """What the course of n candidates follows from; ``shares`` and ``seconds`` (n, restart_paths), the others (n,)."""

    faults: FaultSpec
    times: CheckpointTimes
    step_s: FloatN
    work_s: FloatN
    mtbf_s: FloatN
    restart_paths: tuple[RestartPath, ...]
    shares: FloatN
    seconds: FloatN
    restart_s: FloatN
    waiting: FloatN

    def of_level(self, level: int) -> tuple[FloatN, FloatN]:
        """Share of failures of which a level is the lowest to survive, and one restart time for them; 0, 0 of none."""
        of_level = np.array([w.level == level for w in self.restart_paths])
        total = self.shares[:, of_level].sum(axis=-1, keepdims=True)
        if not np.any(total > 0):
            return np.zeros_like(self.mtbf_s), np.zeros_like(self.mtbf_s)
        some = np.where(total > 0, self.shares[:, of_level] / np.where(total > 0, total, 1.0), 1.0 / of_level.sum())
        level_restart_s = effective_restart_s(self.seconds[:, of_level], some, self.mtbf_s)
        return np.clip(total[:, 0], 0.0, 1.0), np.where(total[:, 0] > 0, level_restart_s, 0.0)


def _waiting_for_levels(
    facts: _Facts, interval_s: ArrayLike | None, every: Sequence[ArrayLike] | None
) -> tuple[FloatN, tuple[CheckpointLevelTimes, ...], dict[str, FloatN]]:
    """Interval, levels and ledger where computing waits for copies of every level."""
    times, zero, places = facts.times, np.zeros_like(facts.step_s), LEVELS[facts.faults.checkpoint.mode]
    takes = {"host": times.copy_s, "peers": times.blocking_peer_copy_s, "storage": times.blocking_s}
    block = [zero + takes[place] for place in places]
    parts, back = zip(*(facts.of_level(k) for k in range(len(places))), strict=True)
    mtbf = facts.mtbf_s
    if interval_s is None:
        best, _ = best_checkpoint_pattern(block, mtbf, parts, back)
        interval = _whole_steps(facts.faults, best, zero, facts.step_s, facts.work_s)
    else:
        interval = np.asarray(interval_s, dtype=np.float64) + zero
    if every is None:
        _, ratios = best_checkpoint_pattern(block, mtbf, parts, back, interval)
    else:
        spans = [np.asarray(e, dtype=np.float64) for e in every]
        ratios = tuple(b / a for a, b in itertools.pairwise(spans))
    shares = ledger_shares_of_levels(interval, ratios, block, mtbf, parts, back)
    shares = {name: value * (1 - facts.waiting) for name, value in shares.items()}
    spans = list(itertools.accumulate([zero + 1.0, *ratios], np.multiply))
    levels = tuple(
        CheckpointLevelTimes(where, b, zero, e + zero) for where, b, e in zip(places, block, spans, strict=True)
    )
    return interval, levels, {**shares, "waiting": facts.waiting + zero}


def _writing_behind(
    facts: _Facts, interval_s: ArrayLike | None, absence: ReplicaAbsence | None = None
) -> tuple[FloatN, tuple[CheckpointLevelTimes, ...], dict[str, FloatN]]:
    """Interval, levels and ledger of one level, or of a fast one with storage written behind it."""
    spec, times, step, mtbf = facts.faults.checkpoint, facts.times, facts.step_s, facts.mtbf_s
    zero, once, waiting = np.zeros_like(step), facts.restart_s, facts.waiting
    block = zero + (times.blocking_s if spec.waits_for_copies else times.copy_s)
    persist = zero if spec.waits_for_copies else zero + times.write_s
    fast = None
    near = far = zero
    quick = zero + 1.0  # share of failures after which the level that decides the interval is read
    if spec.mode in ("memory", "peer"):
        fast = zero + (times.peer_s if spec.mode == "peer" else 0.0)
        (quick, near), (_, far) = facts.of_level(0), facts.of_level(1)

    def course(interval: FloatN) -> tuple[FloatN, FloatN, dict[str, FloatN]]:
        """The interval, its segments between safe checkpoints, and the ledger's parts."""
        parts = expected_ledger_shares(interval, block, mtbf, once, persist, waiting)
        if absence is not None:
            parts = absence.ledger_shares(interval, block, mtbf, once, parts)
        if fast is None:
            return interval, np.ones_like(step), parts
        segments = np.clip(np.ceil(persist / spec.in_flight / (interval + block) - 1e-9), 1, MAX_SPACING)
        ettr = two_level_ettr(
            interval, segments, (block, block), mtbf, (near, far), quick, (fast, persist), facts.work_s
        )
        productive = np.where(np.isinf(interval), 1.0, ettr) * (1 - waiting)
        lost = np.maximum(parts["productive"] + parts["lost"] - productive, 0.0)
        return interval, segments, {**parts, "productive": productive, "lost": lost}

    if interval_s is not None:
        interval, segments, parts = course(np.asarray(interval_s, dtype=np.float64) + zero)
    else:
        under_way = 1.0 if fast is not None else spec.in_flight
        bound = (
            zero
            if spec.waits_for_copies
            else least_interval_s(persist if fast is None else fast, 1.0, block, under_way)
        )
        if fast is not None:  # one copy in so many at least goes on to storage
            bound = np.maximum(bound, least_interval_s(persist, 1.0, block, spec.in_flight * MAX_SPACING))
        powers = (0.0,) if fast is None else (0.0, 0.5, 1.0)
        rare = mtbf if absence is None else absence.all_down_mtbf_s(mtbf)
        wanted = [exact_interval_s(block, rare / np.maximum(quick, LEAST_QUICK) ** power) for power in powers]
        if fast is not None:
            wanted += [_filling(w, block, persist / spec.in_flight, step, more) for w in wanted for more in (0.0, 1.0)]
        outlooks = [course(_whole_steps(facts.faults, w, bound, step, facts.work_s)) for w in wanted]
        interval, segments, parts = _best(outlooks)
    *quicker, safe = LEVELS[spec.mode]
    levels = tuple(CheckpointLevelTimes(where, block, zero if fast is None else fast, zero + 1.0) for where in quicker)
    return interval, (*levels, CheckpointLevelTimes(safe, block, persist, segments)), parts


def _restart_paths(
    reliability: ReliabilitySpec, restart: RestartSpec, spec: CheckpointSpec, times: CheckpointTimes, num_ranks: FloatN,
    has_spares: NDArray[np.bool_], node_mtbf_s: FloatN, zero: FloatN,
) -> tuple[RestartPath, ...]:  # fmt: skip
    """Each kind's restart: detection, isolation, its path, setting up, loading, warming up.

    With peers, a node's states are gone where one of its peers fails while it is being replaced; nodes are taken to
    fail independently.
    """
    common = restart.initialise_s.value + restart.initialise_per_rank_s.value * num_ranks + restart.warm_up_s.value
    path = {name: zero + seconds for name, seconds in _path_s(restart, has_spares).items()}
    host, peers, safe = len(LEVELS[spec.mode]) > 1, "peers" in LEVELS[spec.mode], len(LEVELS[spec.mode]) - 1
    total = sum(kind.share.value for kind in reliability.kinds)
    restart_paths = []
    for kind in reliability.kinds:
        share, node = zero + kind.share.value / total, kind.path == "node"
        before = kind.detect_s.value + kind.isolate_s.value + path[kind.path] + common
        if host and not node:
            restart_paths.append(RestartPath(share, 0, node, before + times.copy_s))
        elif node and peers:
            second = -np.expm1(-(spec.copies - 1) * before / node_mtbf_s)
            restart_paths.append(
                RestartPath(share * (1 - second), safe - 1, node, before + times.copy_s + times.peer_s)
            )
            restart_paths.append(RestartPath(share * second, safe, node, before + times.load_s))
        else:
            restart_paths.append(RestartPath(share, safe, node, before + times.load_s))
    return tuple(restart_paths)


def _filling(interval: FloatN, block: FloatN, persist: FloatN, step: FloatN, more: float) -> FloatN:
    """The next longer interval of which a whole number, with their checkpoints, takes what storage does, or of ``more``
    than that number; where nothing is saved, none at all. [s]"""
    with np.errstate(invalid="ignore", divide="ignore"):
        number = np.maximum(np.floor(persist / (interval + block)), 1.0) + more
    return np.where(np.isinf(interval), interval, np.ceil((persist / number - block) / step - 1e-9) * step)


def _best(outlooks: list[tuple[FloatN, FloatN, dict[str, FloatN]]]) -> tuple[FloatN, FloatN, dict[str, FloatN]]:
    """Of several intervals with their segments and parts, per candidate those that are most productive."""
    which = np.argmax([parts["productive"] for _, _, parts in outlooks], axis=0)

    def chosen(columns: list[FloatN]) -> FloatN:
        return np.asarray(np.choose(which, columns))

    parts = {name: chosen([c[2][name] for c in outlooks]) for name in outlooks[0][2]}
    return chosen([c[0] for c in outlooks]), chosen([c[1] for c in outlooks]), parts


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
        rounded = np.maximum(np.round(np.minimum(wanted, work) / step), 1.0) * step
    return np.where(np.isinf(wanted) & np.isinf(work), np.inf, np.maximum(rounded, least))
