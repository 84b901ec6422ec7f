"""Seconds of every op of a tape, over all K candidates at once; what each rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import (
    PLAIN,
    BoolK,
    FloatK,
    any_true,
    broadcast_to_combinations,
    maximum,
    stack_rows,
    where,
)
from mofa.blocks.op import Op, Tape
from mofa.blocks.work import PRODUCTS, Attention, Collective, Gemm, GroupedGemm, HostCopy, HostSync, MemoryBound
from mofa.cost.kernels.collectives import Fabric, collective_time
from mofa.cost.kernels.compute import (
    attention_kernel_head_size,
    attention_s,
    gemm_s,
    grouped_gemm_s,
    is_aligned_product,
    unaligned_gemm_s,
)
from mofa.cost.kernels.fitted_forms import l2_miss_bytes
from mofa.cost.kernels.slowest_gpu import (
    PaceFactors,
    PaceSpread,
    StragglerFractions,
    expected_slowest,
    expected_slowest_of_gpu_counts,
    waiting_fraction,
)
from mofa.cost.kernels.token_spread import TokenSpread
from mofa.cost.kernels.topology import ProcessGroup, stacked_groups
from mofa.specs.curves import FittedCurve, PowerLimitedCurve, expected_max_uniform
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.power import clock_at_power_draw

ArrayK = NDArray[np.float64]


Known = dict[int, tuple[tuple[Op, ...], tuple[FloatK, ...]]]
"""Seconds of tapes' ops, by the ``id`` of these, which stay, so that no others get it."""
MOST_KEPT = 1024
"""Combinations of which what was timed is kept: one candidate is costed in closed form and played, few are costed at
several clocks, and many would fill the memory. [-]"""
AT_ONCE = 32_768
"""Entries of memory-bound ops, one for each combination, that are timed at once: arrays that the cache holds. [-]"""


@dataclass(frozen=True)
class TimedOpCache:
    """A cache of the seconds of ops that were timed already, where there are few combinations."""

    works: dict[Hashable, tuple[Op, FloatK]] = field(default_factory=dict)
    """By :func:`_work_key`. [s]"""
    device: Known = field(default_factory=dict)
    host: Known = field(default_factory=dict)


@dataclass(frozen=True)
class OpTimingMachine:
    """The machine that ops are timed on: the cluster, the process groups of the K candidates, the framework's way to
    issue."""

    cluster: ClusterSpec
    groups: Mapping[str, ProcessGroup]
    framework: FrameworkSpec
    num_k: int
    token_spread: TokenSpread | None = None
    """Where copies of a token go, for dispatchers that send a token once to each place."""
    host_lead_lost: bool = False
    """Whether a kernel that was loaded has taken the lead that the host had (:mod:`mofa.cost.kernels.lazy_loading`)."""
    idle_fraction: float = 0.0
    """Share of the time in which the device waits besides (:mod:`mofa.cost.step_time.power_averaging`). [-]"""
    num_gpus: NDArray[np.int64] | None = None
    """GPUs of each combination; the cluster's of all where absent. (K,) [-]"""
    meeting_gpus: NDArray[np.int64] | None = None
    """GPUs that wait for each other within every layer, of each combination; one where absent. (K,) [-]"""
    meeting_hosts: NDArray[np.int64] | None = None
    """Ranks whose hosts wait for each other within every layer, of each combination; one where absent. (K,) [-]"""
    pace: PaceFactors | None = None
    """That of the GPUs, over a typical one's; the expected one of the slowest where absent. [-]"""
    timed_ops: TimedOpCache = field(default_factory=TimedOpCache, repr=False, compare=False)
    """Shared by machines that differ in ``host_lead_lost`` alone."""

    def with_idle_fraction(self, idle: float) -> OpTimingMachine:
        """The machine with GPUs that wait for a share of the time beside their ops, which the power limit makes up."""
        return replace(self, idle_fraction=idle, timed_ops=TimedOpCache(self.timed_ops.works, host=self.timed_ops.host))

    def at_pace(self, pace: PaceFactors) -> OpTimingMachine:
        """The machine with GPUs of a pace of their own."""
        return replace(self, pace=pace, timed_ops=TimedOpCache(self.timed_ops.works, host=self.timed_ops.host))

    def on_hosts_of(self, cluster: ClusterSpec) -> OpTimingMachine:
        """The machine with the same GPUs, of a cluster whose hosts alone differ: devices take as long."""
        return replace(self, cluster=cluster, timed_ops=TimedOpCache(self.timed_ops.works, self.timed_ops.device))

    @cached_property
    def network_fabric(self) -> Fabric:
        """The network as collectives see it."""
        return Fabric.from_cluster(self.cluster)

    @cached_property
    def slowest_host_factor(self) -> float:
        """As :attr:`mofa.specs.hardware.ClusterSpec.slowest_host_factor`. [-]"""
        return self.cluster.slowest_host_factor

    @cached_property
    def meeting_hosts_factor(self) -> FloatK:
        """As :meth:`mofa.specs.hardware.ClusterSpec.meeting_hosts_factor`, of each combination. (K,) [-]"""
        if self.meeting_hosts is None:
            return 1.0
        if self.num_k == 1:
            return self.cluster.meeting_hosts_factor(int(self.meeting_hosts[0]))
        numbers, of = np.unique(self.meeting_hosts, return_inverse=True)
        return np.array([self.cluster.meeting_hosts_factor(number) for number in numbers.tolist()])[of]

    @cached_property
    def slowest_gpu_slowdown(self) -> tuple[FloatK, FloatK]:
        """How much longer power-limited kernels, and others, take on the slowest of all GPUs than on a typical one, as
        all wait (:func:`mofa.cost.kernels.slowest_gpu.expected_slowest`). (K,) each [-]"""
        if self.pace is not None:
            return self.pace
        spread = PaceSpread.from_cluster(self.cluster)
        if self.num_gpus is None or self.num_k == 1:
            return expected_slowest(spread, self.cluster.num_gpus if self.num_gpus is None else int(self.num_gpus[0]))
        return expected_slowest_of_gpu_counts(spread, self.num_gpus)

    def slowdown_by_clock_swings(self, clock: FloatK) -> FloatK:
        """How much more power-limited kernels of a layer take because GPUs that meet in it are slow in turn. (K,) [-]

        At the limit each GPU's clock swings by itself within tens of milliseconds. Those that meet in a layer wait for
        whichever is slow then: of chips that differ and swing, the slowest of ``n`` at a time takes ``sqrt(chips^2 +
        swings^2)`` for each of their chips' deviation that :attr:`slowest_gpu_slowdown` has.

        Parameters
        ----------
        clock
            That the limit leaves on average, over the full one. (K,) [-]
        """
        curves, numbers = self.cluster.gpu.curves, self.meeting_gpus
        swing = None if curves.power_limit is None else curves.power_limit.clock_swing
        if swing is None or numbers is None:
            return 0.0
        chips = PaceSpread.from_cluster(self.cluster).chips
        swings = swing.value * (1.0 - clock)
        more = (chips**2 + swings**2) ** 0.5 - chips
        largest: FloatK = expected_max_uniform(int(numbers[0])) if self.num_k == 1 else self._largest_swings
        return more * largest

    @cached_property
    def _largest_swings(self) -> NDArray[np.float64]:
        assert self.meeting_gpus is not None
        numbers, of = np.unique(self.meeting_gpus, return_inverse=True)
        return np.array([expected_max_uniform(number) for number in numbers.tolist()])[of]

    def uses_world_communicator(self, group: str) -> BoolK:
        """Where a group's communicator is that of all ranks: PyTorch's device mesh makes none for a dimension that
        spans them (device_mesh.py), Megatron makes one for every group. (K,)"""
        return self._spans_world.get(group, False)

    @cached_property
    def _spans_world(self) -> dict[str, BoolK]:
        if not self.framework.traits.has_pytorch_modules or "world" not in self.groups:
            return {}
        world = self.groups["world"].size
        same = {name: np.broadcast_to(group.size == world, (self.num_k,)) for name, group in self.groups.items()}
        return {name: bool(entries[0]) if self.num_k == 1 else entries for name, entries in same.items()}

    def compute_tape_once(
        self, clock: Literal["device", "host"], ops: tuple[Op, ...], compute: Callable[[], list[FloatK]]
    ) -> list[FloatK]:
        """What ``compute`` returns for the ops of a tape; called once where there are few combinations."""
        if self.num_k > MOST_KEPT:
            return compute()
        tapes = self.timed_ops.device if clock == "device" else self.timed_ops.host
        known = tapes.get(id(ops))
        if known is None:
            known = tapes[id(ops)] = ops, tuple(compute())
        return list(known[1])


def _rows(array: ArrayK) -> list[FloatK]:
    """The rows of an array, plain numbers where they have one entry."""
    return array[:, 0].tolist() if array.shape[1] == 1 else list(array)


UNTIMED = (type(None), HostSync)
"""Work that takes the device no time."""
Timed = Mapping[int, FloatK]
"""Seconds of the work of each op that has any, by the op's ``id``; the ops must live as long."""


def _work_key(op: Op) -> Hashable:
    """The same for ops that take the same time: recomputed copies, the tapes of other recomputation modes."""
    work = op.work
    if type(work) is MemoryBound:
        launches = op.launches
        return id(work), launches if isinstance(launches, PLAIN) else id(launches), op.compiled
    return id(work)


def _work_kind(op: Op) -> Hashable:
    """Ops of one kind are timed by one call: what the call takes that is not an array."""
    w = op.work
    if type(w) is MemoryBound:
        return MemoryBound
    if type(w) is Gemm:
        return Gemm, w.format
    if type(w) is GroupedGemm:
        return GroupedGemm, w.format, w.wgrad, w.sequential, w.kernel, w.added_bytes
    if type(w) is Attention:
        return Attention, w.backward, w.d_qk, w.d_v, w.backend
    if type(w) is HostCopy:
        return (HostCopy,)
    assert type(w) is Collective
    return Collective, w.kind


def device_seconds_of_works(ops: Iterable[Op], machine: OpTimingMachine) -> Timed:
    """Device time of every distinct work of ops, before the power limit of :func:`device_seconds`. [s]

    All works of a kind are timed by one call, so that an estimate of one candidate makes few.
    """
    works = machine.timed_ops.works if machine.num_k <= MOST_KEPT else {}
    kinds: dict[Any, dict[Hashable, Op]] = defaultdict(dict)
    keys: dict[int, Hashable] = {}
    met = set(works)
    for op in ops:
        if type(op.work) in UNTIMED:
            continue
        key = keys[id(op)] = _work_key(op)
        if key not in met:
            met.add(key)
            kinds[_work_kind(op)][key] = op
    for kind, op_of_work in kinds.items():
        some = list(op_of_work.values())
        took = _rows(_seconds_of_kind(kind, some, machine))
        works.update(zip(op_of_work, zip(some, took, strict=True), strict=True))
    return {name: works[key][1] for name, key in keys.items()}


def _seconds_of_kind(kind: Any, ops: list[Op], machine: OpTimingMachine) -> ArrayK:
    """Device time of ops of one kind. (len(ops), K) [s]"""
    gpu, num_k = machine.cluster.gpu, machine.num_k

    def columns(*names: str) -> ArrayK:
        return stack_rows([getattr(op.work, name) for name in names for op in ops], num_k).reshape(-1, len(ops), num_k)

    if kind is MemoryBound:
        size = max(1, AT_ONCE // num_k)
        return np.concatenate([_stream_seconds(ops[n : n + size], machine) for n in range(0, len(ops), size)])
    if kind[0] is HostCopy:
        return np.asarray(columns("bytes")[0] / gpu.host_link_bytes_per_s.value)
    if kind[0] is Gemm:
        m, n, k, count = columns("m", "n", "k", "count")
        time_s = gemm_s(m, n, k, gpu, kind[1], count)
        if kind[1] != "bf16":
            return time_s
        return unaligned_gemm_s(time_s, m, n, k, count, [op.work.product for op in ops if type(op.work) is Gemm], gpu)
    if kind[0] is GroupedGemm:
        rows, groups, n, k, uneven = columns("rows", "groups", "n", "k", "uneven")
        return grouped_gemm_s(
            rows, groups, n, k, gpu, kind[1], wgrad=kind[2], sequential=kind[3], uneven=uneven, kernel=kind[4],
            added_bytes=kind[5],
        )  # fmt: skip
    if kind[0] is Collective:
        places = [machine.groups[op.work.group] for op in ops if isinstance(op.work, Collective)]
        group = stacked_groups(places)
        payload, imbalance = columns("payload", "imbalance")
        time = collective_time(
            kind[1], payload, group, machine.network_fabric, imbalance=imbalance, spread=machine.token_spread
        )
        return time.total_s
    batch, heads, groups, q_len, pairs = columns("batch", "heads", "groups", "q_len", "pairs")
    return attention_s(batch, heads, groups, q_len, pairs, kind[2], kind[3], gpu, backward=kind[1], backend=kind[4])


def device_seconds(ops: tuple[Op, ...], machine: OpTimingMachine, timed: Timed | None = None) -> list[FloatK]:
    """Device time of each op of a tape on the slowest GPU, 0 where it is not present. (K,) each [s]

    ``timed`` has the works of several tapes that were timed together.
    """
    return device_seconds_and_stragglers(ops, machine, timed)[0]


def device_seconds_and_stragglers(
    ops: tuple[Op, ...], machine: OpTimingMachine, timed: Timed | None = None
) -> tuple[list[FloatK], StragglerFractions]:
    """:func:`device_seconds`, and what of them is waited for the slowest GPU. (K,) each [s], [-]"""
    *seconds, of_products, of_others = machine.compute_tape_once(
        "device", ops, lambda: _device_seconds(ops, machine, timed)
    )
    return seconds, StragglerFractions(of_products, of_others)


def _device_seconds(ops: tuple[Op, ...], machine: OpTimingMachine, timed: Timed | None) -> list[FloatK]:
    """Seconds of ops, and behind them the parts of :class:`StragglerFractions`."""
    if timed is None:
        timed = device_seconds_of_works(ops, machine)
    out: list[FloatK] = [0.0] * len(ops)
    for i, op in enumerate(ops):
        if (took := timed.get(id(op))) is not None:
            out[i] = took if op.present is True else where(op.present, took, 0.0)
    slowest = _throttle(out, ops, machine)
    others = machine.slowest_gpu_slowdown[1]
    if any_true(others > 1.0):
        for i, op in enumerate(ops):
            if type(op.work) is MemoryBound:
                out[i] = out[i] * others
    return [*out, waiting_fraction(slowest), waiting_fraction(others)]


def device_seconds_array(ops: tuple[Op, ...], machine: OpTimingMachine) -> ArrayK:
    """Device time of each op of a tape, as :func:`device_seconds`, as one array. (len(ops), K) [s]"""
    return stack_rows(device_seconds(ops, machine), machine.num_k)


def _throttle(seconds: list[FloatK], ops: tuple[Op, ...], machine: OpTimingMachine) -> FloatK:
    """Change seconds of a tape to those at the clock that the power limit leaves, which depends on the mix of kernels,
    products to those of the slowest GPU. How much longer that takes for them than a typical one is returned. (K,) [-]

    Assumes that the limit acts on the mean over a phase of a block and over what the device waits besides
    (``OpTimingMachine.idle_fraction``); times come in as between memory-bound kernels, which take longer as well where
    they are bound by what multiprocessors issue.
    """
    kinds: dict[Any, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        if type(op.work) in PRODUCTS:
            kinds[_work_kind(op)].append(i)
    if not kinds:
        return machine.slowest_gpu_slowdown[0]
    compute_s = sum([took for op, took in zip(ops, seconds, strict=True) if op.stream == "compute"], 0.0)
    mix = [
        _Products(_powered_curve(kind, machine), rows, sum((seconds[i] for i in rows), 0.0) / maximum(compute_s, 1e-12))
        for kind, rows in kinds.items()
    ]
    curves = machine.cluster.gpu.curves
    limit, memory = curves.power_limit, curves.stream_clock
    busy = limit.mix_weight_beside_idle(machine.idle_fraction) if limit is not None and machine.idle_fraction else 1.0
    clock = 1.0 if memory is None else clock_at_power_draw(busy * _drawn(mix, seconds, ops, machine, memory.value**-2))
    work = busy * sum((products.share for products in mix), 0.0)
    slowest = machine.slowest_gpu_slowdown[0] + machine.slowdown_by_clock_swings(clock)
    for curve, rows, _ in mix:
        # where clocks were not read, the share of products and attention says how far it falls
        rate_fraction = (
            curve.rate_over_full_clock(np.minimum(work, 1.0)) if memory is None else curve.relative_rate_at_clock(clock)
        )
        slower: FloatK = curve.sustained / rate_fraction * slowest
        if isinstance(slower, np.generic):
            slower = float(slower)
        for i in rows:
            seconds[i] = seconds[i] * slower
    if memory is not None:
        _slow_streams(seconds, ops, machine, clock)
    return slowest


class _Products(NamedTuple):
    """Products, or attention, of one kind in a tape."""

    curve: PowerLimitedCurve
    rows: list[int]
    """Their places in the tape."""
    share: FloatK
    """Of the time of the compute stream. [-]"""


def _drawn(
    mix: list[_Products], seconds: list[FloatK], ops: tuple[Op, ...], machine: OpTimingMachine, least: float
) -> FloatK:
    """Mean power of a tape's kernels at full clock over the limit. [-]

    Memory-bound kernels draw ``least`` where their own draw was not read, products more by their load.
    """
    drawn: FloatK = 0.0
    for curve, rows, share in mix:
        drawn = drawn + share * curve.draw_over_power_limit(_load(curve, rows, seconds, ops), least)
    curves = machine.cluster.gpu.curves
    compute_s: FloatK = 0.0
    others: FloatK = 0.0
    for op, took in zip(ops, seconds, strict=True):
        if op.stream != "compute":
            continue
        compute_s = compute_s + took
        if type(op.work) is MemoryBound:
            own = curves.memory_bound_curve_like(op.work.like, op.compiled).draw
            others = others + took * (least if own is None else own)
        elif type(op.work) not in PRODUCTS:
            others = others + took * least
    return drawn + others / maximum(compute_s, 1e-12)


def _load(curve: PowerLimitedCurve, rows: list[int], seconds: list[FloatK], ops: tuple[Op, ...]) -> FloatK:
    """Mean load of products of one kind over their time. [-]

    Attention, and products whose rows are read in pieces of less than 16 bytes, count as at full load: those are slow
    for other reasons than few multiplications a byte.
    """
    loaded: FloatK = 0.0
    total: FloatK = 0.0
    for i in rows:
        work, took = ops[i].work, seconds[i]
        load: FloatK = curve.fraction_of_full_load(work.flops, took) if isinstance(work, (Gemm, GroupedGemm)) else 1.0
        if isinstance(work, Gemm):
            load = where(is_aligned_product(work), load, 1.0)
        loaded, total = loaded + load * took, total + took
    return loaded / maximum(total, 1e-12)


def _slow_streams(seconds: list[FloatK], ops: tuple[Op, ...], machine: OpTimingMachine, clock: FloatK) -> None:
    """Make the memory-bound ops of a tape as much longer as their kernels wait for the clock, in place."""
    curves, longer = machine.cluster.gpu.curves, 1.0 / clock - 1.0
    for i, op in enumerate(ops):
        if type(op.work) is MemoryBound and (
            share := curves.memory_bound_curve_like(op.work.like, op.compiled).clock_share
        ):
            seconds[i] = seconds[i] * (1.0 + share * longer)


def _powered_curve(kind: Any, machine: OpTimingMachine) -> PowerLimitedCurve:
    """The curve of a kind of kernels that the power limit slows down."""
    curves = machine.cluster.gpu.curves
    if kind[0] is Attention:
        widths = attention_kernel_head_size(kind[2], kind[4]), attention_kernel_head_size(kind[3], kind[4])
        return curves.nearest_attention_curve((kind[4], "bwd" if kind[1] else "fwd", *widths))[1]
    if kind[0] is GroupedGemm and not kind[3]:
        return curves.grouped_gemm_curve(kind[1]) if kind[4] == "one" else curves.multi_stream_curve(kind[1])
    return curves.gemm_curve(kind[1])


def kernel_curve(op: Op, machine: OpTimingMachine) -> FittedCurve | None:
    """The curve that an op's kernels are timed by; None of an op that has none, or communicates."""
    if type(op.work) is MemoryBound:
        return machine.cluster.gpu.curves.memory_bound_curve_like(op.work.like, op.compiled)
    return _powered_curve(_work_kind(op), machine) if type(op.work) in PRODUCTS else None


def _stream_seconds(ops: list[Op], machine: OpTimingMachine) -> ArrayK:
    """Memory-bound ops: a launch for each kernel, and their bytes over the rate of the measured op that they are like.

    An op of several kernels may have been measured as one, such as gradients sorted and added to rows. It takes its own
    floor where that is more. Where the op gives its elements and width, the measured op's whole form counts: bytes,
    rows and columns; of an op that is like none that was measured its bytes alone. Where it reads rows again, those
    that the L2 does not hold count too. Parts that are like other ops take their rates.
    """
    num_k, curves = machine.num_k, machine.cluster.gpu.curves
    works = [op.work for op in ops if isinstance(op.work, MemoryBound)]
    kinds = [(work.like, op.compiled) for work, op in zip(works, ops, strict=True)]
    known = {kind: curves.memory_bound_curve_like(*kind).form for kind in set(kinds)}
    like = [known[kind] for kind in kinds]
    moved = stack_rows([w.bytes for w in works], num_k)
    launches = np.maximum(stack_rows([op.launches for op in ops], num_k), 1.0)
    busy = (moved > 0) | (launches > 1)
    extra = np.zeros_like(moved)
    rate = np.array([[form.bytes_per_s] for form in like])
    for i, (work, op) in enumerate(zip(works, ops, strict=True)):
        for part, other in work.parts:
            moved[i] -= part
            extra[i] += part / curves.memory_bound_curve_like(other, op.compiled).form.bytes_per_s
    unlike = curves.memory_bound_curve_like("", False).form  # what none was measured like moves its own bytes
    if shaped := [i for i, work in enumerate(works) if any_true(work.width > 0) and like[i] is not unlike]:
        elements = stack_rows([works[i].elements for i in shaped], num_k)
        width = np.maximum(stack_rows([works[i].width for i in shaped], num_k), 1.0)
        forms = [like[i] for i in shaped]
        each, row, column = np.array([[f.bytes_per_element, f.per_row_s, f.per_column_s] for f in forms]).T[:, :, None]
        moved[shaped] = elements * each
        extra[shaped] += elements * (row / width) + column * width
    again = [i for i, (work, form) in enumerate(zip(works, like, strict=True))
             if form.missed_bytes_per_s and any_true(work.source)]  # fmt: skip
    if again:
        source = stack_rows([works[i].source for i in again], num_k)
        missed = l2_miss_bytes(moved[again], source, machine.cluster.gpu.l2_bytes.value)
        extra[again] += missed / np.array([[like[i].missed_bytes_per_s] for i in again])
    launch_s = curves.memory_bound_curve_like("", False).form.launch_s
    floor_s = np.maximum(launches * launch_s, np.array([[form.launch_s] for form in like]))
    return np.where(busy, moved / rate + extra + floor_s, 0.0)


def tape_flops(tape: Tape, num_k: int) -> ArrayK:
    """Matrix and attention FLOPs of a tape on one rank. (K,) [FLOP]"""
    total: FloatK = 0.0
    for op in tape.ops:
        work = op.work
        if isinstance(work, PRODUCTS):
            total = total + where(op.present, work.flops, 0.0)
    return broadcast_to_combinations(total, num_k)
