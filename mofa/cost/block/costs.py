"""What blocks cost, over the unique combinations of degrees: their phases, their memory, their weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import BlockTapes, distinct_layer_kinds
from mofa.blocks.combined_passes import combined_tape
from mofa.blocks.context import Context
from mofa.blocks.elementwise import FloatK, broadcast_to_combinations, stack_rows
from mofa.blocks.frameworks import persistent_buffer_bytes_without_and_with_head
from mofa.blocks.op import KINDS, Op, Tape
from mofa.blocks.tapes import KnownTimes, kept_layer_label, layer_label
from mofa.blocks.work import Collective, HostCopy
from mofa.cost.block.combined_memory import peak_bytes_of_layer_pair
from mofa.cost.block.deferred_weight_gradients import SplitBackwardMemory, split_backward_memory
from mofa.cost.block.durations import OpTimingMachine, Timed, device_seconds_of_works
from mofa.cost.block.host_clock import ClockAdvance
from mofa.cost.block.host_issue import weight_cast_issue_seconds
from mofa.cost.block.liveness import (
    BLOCK_GRADIENTS,
    EXPERT_GRADIENTS,
    BlockMemory,
    block_memories,
    nccl_freed_bytes_and_launches,
    peak_bytes_from_accumulation,
    watchdog_held_bytes,
)
from mofa.cost.block.tape_clock import TapeTime, time_per_tape_repetition, times_of_backward_halves
from mofa.cost.kernels.slowest_gpu import PaceFactors
from mofa.cost.kernels.topology import ProcessGroup
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import RecomputeSpec

ArrayK = NDArray[np.float64]
MOST_MACHINES = 8
"""Machines on which the times of a context's tapes are kept. [-]"""
SIZES = 4
"""Sizes of weights by which tensors are told apart for the allocator. [-]"""


@dataclass(frozen=True, eq=False)
class _Same:
    """An object that equals itself alone."""

    of: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


class BlockTimer:
    """The times of blocks' tapes on a machine.

    Works that several tapes share are timed once. A tape is scanned when it is first asked for: playing a plan asks
    for few. Where there is one combination, times are put into ``known_times`` for plans of the same blocks.
    """

    def __init__(
        self, tapes: Mapping[str, BlockTapes], machine: OpTimingMachine, known_times: KnownTimes | None = None
    ) -> None:  # fmt: skip
        self.tapes, self.machine, self.known_times = tapes, machine, known_times
        self._known: dict[int, tuple[Tape, TapeTime]] = {}
        if known_times is not None:
            key = self._timed_on()
            self._known = known_times.pop(key, self._known)
            known_times[key] = self._known
            if len(known_times) > MOST_MACHINES:  # what was asked for longest ago
                del known_times[next(iter(known_times))]

    def _timed_on(self) -> Hashable:
        """What the times of tapes of one combination depend on besides them."""
        m = self.machine
        used = {op.work.group for tape in self._tapes for op in tape.ops if isinstance(op.work, Collective)}
        groups = [
            (name, m.groups[name].key_of_first_strategy) for name in sorted({*used, "ep", "world"} & m.groups.keys())
        ]
        num_gpus = None if m.num_gpus is None else int(m.num_gpus[0])
        meeting = None if m.meeting_gpus is None else int(m.meeting_gpus[0])
        hosts = None if m.meeting_hosts is None else int(m.meeting_hosts[0])
        return _Same(m.cluster), m.host_lead_lost, m.idle_fraction, num_gpus, meeting, hosts, *groups

    @property
    def _tapes(self) -> Iterator[Tape]:
        return (tape for block in self.tapes.values() for tape in (block.forward, block.backward))

    @cached_property
    def _timed(self) -> Timed:
        return device_seconds_of_works(
            (op for tape in self._tapes if id(tape) not in self._known for op in tape.ops), self.machine
        )

    def forward_time(self, blocks: Sequence[BlockTapes]) -> TapeTime:
        """Time of the forwards of blocks one behind the other."""
        return reduce(_both, [self._of(block.forward) for block in blocks])

    def backward_time(self, blocks: Sequence[BlockTapes]) -> TapeTime:
        """Time of the backwards of blocks, from the last on."""
        return reduce(_both, [self._of(block.backward) for block in reversed(blocks)])

    def combined_time(self, forward: BlockTapes, backward: BlockTapes) -> TapeTime:
        """Time of a block's forward beside a block's backward of another micro-batch."""
        delays = self.machine.framework.delay_wgrad
        tape = combined_tape(forward.forward, backward.forward, backward.backward, delays=delays)
        return time_per_tape_repetition(tape, self.machine)

    def _of(self, tape: Tape) -> TapeTime:
        if id(tape) not in self._known:
            self._known[id(tape)] = tape, time_per_tape_repetition(tape, self.machine, timed=self._timed)
        return self._known[id(tape)][1]


def _both(first: TapeTime, second: TapeTime) -> TapeTime:
    return TapeTime(
        first.exposed + second.exposed, first.hidden + second.hidden, first.issue + second.issue,
        np.array(ClockAdvance(*first.clocks).followed_by(ClockAdvance(*second.clocks))), first.weights + second.weights,
        first.busy + second.busy,
        first.slack + second.slack,
        first.aside + second.aside,
        first.lost_aside + second.lost_aside,
        np.where(
            second.behind_experts < second.busy, second.behind_experts, first.behind_experts + second.behind_experts
        ),
    )  # fmt: skip


class BlockMemories:
    """The memory of blocks, of all in one go when that of any is asked for: who plays the time alone does not.

    Of tensors larger than each of the sizes ``large`` (sizes, K) it is said apart what is alive. [B]
    """

    def __init__(self, tapes: Mapping[str, BlockTapes], num_k: int, large: Callable[[], ArrayK]) -> None:
        self.tapes, self.num_k, self.large = tapes, num_k, large

    @cached_property
    def _of_each(self) -> dict[int, BlockMemory]:
        blocks = self.tapes.values()
        return dict(zip(map(id, blocks), block_memories(blocks, self.num_k, self.large()), strict=True))

    def memory_of(self, blocks: Sequence[BlockTapes]) -> BlockMemory:
        """Of blocks one behind the other: what one keeps stays while those behind it run."""
        return reduce(BlockMemory.followed_by, [self._of_each[id(block)] for block in blocks])


@dataclass(frozen=True)
class BlockCost:
    """Costs of a block, or of blocks one behind the other, under one recomputation; arrays over K."""

    blocks: tuple[BlockTapes, ...]
    phases: BlockTimer
    memories: BlockMemories
    forward_flops: ArrayK
    backward_flops: ArrayK
    autocast_cached_bytes: ArrayK
    """Weight copies that autocast's cache holds until the loss is there although the graph does not keep them. [B]"""

    @cached_property
    def forward(self) -> TapeTime:
        """Its forward's time."""
        return self.phases.forward_time(self.blocks)

    @cached_property
    def backward(self) -> TapeTime:
        """Its backward's time."""
        return self.phases.backward_time(self.blocks)

    @cached_property
    def memory(self) -> BlockMemory:
        """What it allocates."""
        return self.memories.memory_of(self.blocks)

    @cached_property
    def peak_bytes_from_expert_gradients(self) -> ArrayK:
        """The most alive of its last block from the op on that makes the experts' fp32 gradients, a group of their
        own. (len(KINDS), K) [B]"""
        return peak_bytes_from_accumulation(self.blocks[-1], EXPERT_GRADIENTS, self.memories.num_k)

    @cached_property
    def peak_bytes_from_block_gradients(self) -> ArrayK:
        """The most alive from the op on that makes the fp32 gradients of the block's own group. (len(KINDS), K) [B]"""
        return peak_bytes_from_accumulation(self.blocks[-1], BLOCK_GRADIENTS, self.memories.num_k)

    @cached_property
    def nccl_freed_bytes_and_launches(self) -> ArrayK:
        """What NCCL's stream uses of it, and its launches
        (:func:`mofa.cost.block.liveness.nccl_freed_bytes_and_launches`)."""
        return sum(
            (nccl_freed_bytes_and_launches(block, self.memories.num_k) for block in self.blocks), np.zeros((4, 1))
        )

    @cached_property
    def weight_cast_issue_s(self) -> ArrayK:
        """What the host takes to issue the casts of its weights to fp8, in a step's first micro-batch. (K,) [s]"""
        machine = self.phases.machine
        each = (np.asarray(weight_cast_issue_seconds(block.forward.ops, machine)) for block in self.blocks)
        return sum(each, np.zeros(self.memories.num_k))

    @cached_property
    def copies_to_host_s(self) -> ArrayK:
        """Seconds of its forward's copies to the host, by themselves. (K,) [s]"""
        link = self.phases.machine.cluster.gpu.host_link_bytes_per_s.value
        return np.asarray(self._copied_bytes.sum(axis=0) / link)

    @cached_property
    def pinned_bytes(self) -> ArrayK:
        """Of the host, for these copies: each a power of two. (K,) [B]"""
        copied = self._copied_bytes
        return np.asarray(np.where(copied > 0.0, 2.0 ** np.ceil(np.log2(np.maximum(copied, 1.0))), 0.0).sum(axis=0))

    @cached_property
    def _copied_bytes(self) -> ArrayK:
        """Of each copy of its forward to the host. (copies, K) [B]"""
        works = [op.work for block in self.blocks for op in block.forward.ops]
        return stack_rows([work.bytes for work in works if isinstance(work, HostCopy)], self.memories.num_k)

    @cached_property
    def watchdog_held_bytes(self) -> ArrayK:
        """What PyTorch's watchdog lets go of it (:func:`mofa.cost.block.liveness.watchdog_held_bytes`)."""
        return sum((watchdog_held_bytes(block, self.memories.num_k) for block in self.blocks), np.zeros((2, 1)))

    def followed_by(self, block: BlockCost) -> BlockCost:
        """This block and one behind it as one: what this one keeps stays while the other runs."""
        return BlockCost(
            self.blocks + block.blocks, self.phases, self.memories,
            self.forward_flops + block.forward_flops, self.backward_flops + block.backward_flops,
            self.autocast_cached_bytes + block.autocast_cached_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class EqualWeightsOfOp:
    """Weights of one op of a block: the parameters of each and how many there are, (K,); whether they are experts'."""

    params: FloatK
    number: FloatK
    expert: bool


@dataclass(frozen=True, eq=False)  # so that what is worked out of them is known again
class WeightsByBlock:
    """The weights of each kind of layer, of the embedding and of the head."""

    layers: tuple[tuple[EqualWeightsOfOp, ...], ...]
    embedding: tuple[EqualWeightsOfOp, ...]
    head: tuple[EqualWeightsOfOp, ...]
    num_k: int

    @cached_property
    def largest_and_commonest_weight_params(self) -> ArrayK:
        """Of the largest weight of a layer, then of the sizes that most parameters of a layer are in. (1 + SIZES, K)
        [params]"""
        largest = self.params_of_each_weight[: sum(map(len, self.layers))].max(axis=0)
        alike = self.params_of_each_weight[:, None] == self.params_of_each_weight[None]
        total = np.einsum("vwk,wk->vk", alike, self.params_of_each_weight * self.number_of_each_weight)
        again = np.any(alike & np.tri(len(alike), k=-1, dtype=bool)[:, :, None], axis=1)  # as an earlier one
        most = np.argsort(np.where(again, 0.0, -total), axis=0, kind="stable")[:SIZES]
        return np.concatenate([largest[None], self.params_of_each_weight[most, np.arange(self.num_k)]])

    @cached_property
    def _all(self) -> list[tuple[int, EqualWeightsOfOp]]:
        every = (*self.layers, self.embedding, self.head)
        return [(kind, weight) for kind, weights in enumerate(every) for weight in weights]

    @cached_property
    def block_of_each_weight(self) -> NDArray[np.intp]:
        """Of all weights: the kind of layer, or behind these the embedding and the head. (W,)"""
        return np.array([kind for kind, _ in self._all])

    @cached_property
    def is_expert_weight(self) -> NDArray[np.bool_]:
        """Of all weights: whether they are experts'. (W,)"""
        return np.array([weight.expert for _, weight in self._all])

    @cached_property
    def params_of_each_weight(self) -> ArrayK:
        """Of all weights: the parameters of each. (W, K) [params]"""
        return stack_rows([weight.params for _, weight in self._all], self.num_k)

    @cached_property
    def number_of_each_weight(self) -> ArrayK:
        """Of all weights: how many there are. (W, K) [-]"""
        return stack_rows([weight.number for _, weight in self._all], self.num_k)


@dataclass(frozen=True)
class BlockCosts:
    """Costs of all blocks, everything that the composition needs, over the K unique combinations; ``index`` (n,) maps
    candidates to them.

    ``blocks[mode]`` lists the kinds of layer in the order of :func:`mofa.blocks.build.distinct_layer_kinds`.
    """

    context: Context
    groups: Mapping[str, ProcessGroup]
    index: NDArray[np.intp]
    blocks: Mapping[RecomputeSpec, tuple[BlockCost, ...]]
    embedding: BlockCost
    head: BlockCost
    mtp: Mapping[RecomputeSpec, BlockCost] | None
    layer_ops: tuple[tuple[Op, ...], ...]
    """The forward ops of each kind of layer."""
    stage_boundary_bytes: ArrayK
    """The residual stream of a micro-batch on one rank: what one stage hands to the next. (K,) [B]"""
    tapes: Mapping[str, BlockTapes]
    machine: OpTimingMachine
    weights: WeightsByBlock

    @cached_property
    def logits_bytes(self) -> ArrayK:
        """What the loss reads of a micro-batch: the last stage's output. (K,) [B]"""
        forward = self.tapes["head"].forward
        name = next(op.reads[0] for op in forward.ops if op.part == "loss" and op.reads)
        for op in reversed(forward.ops):
            if op.work is None and name in op.writes:  # a view
                name = op.reads[0]
        return broadcast_to_combinations(forward.tensors[name].bytes, self.machine.num_k)

    def persistent_bytes(self, kinds: frozenset[int], *, has_predictions: bool, has_head: bool) -> ArrayK:
        """Buffers of a stage that stay allocated from the first use on, outside the tapes: of the products of its own
        blocks. (K,) [B]

        Parameters
        ----------
        kinds
            Of its layers, by their places in :func:`mofa.blocks.build.distinct_layer_kinds`.
        has_predictions, has_head
            Whether the model's multi-token predictions, and its head, are there.
        """
        key = kinds, has_predictions
        if key not in self._persistent_bytes:
            ops = [op for kind in sorted(kinds) for op in self.layer_ops[kind]]
            ops += self.tapes["mtp"].forward.ops if has_predictions else ()
            self._persistent_bytes[key] = persistent_buffer_bytes_without_and_with_head(
                self.machine.framework, self.context, ops
            )
        return broadcast_to_combinations(self._persistent_bytes[key][has_head], self.machine.num_k)

    @cached_property
    def _persistent_bytes(self) -> dict[tuple[frozenset[int], bool], tuple[FloatK, FloatK]]:
        return {}

    def without_host_lead(self) -> BlockCosts:
        """The block costs where kernels that are loaded take the host's lead in all passes: only times differ."""
        return self._on(replace(self.machine, host_lead_lost=True), self.embedding.phases.known_times)

    def with_idle_fraction(self, idle_fraction: float) -> BlockCosts:
        """The block costs on GPUs that wait for a share of the time beside their ops: only times differ."""
        return self._on(self.machine.with_idle_fraction(idle_fraction), self.embedding.phases.known_times)

    def at_pace(self, pace: PaceFactors) -> BlockCosts:
        """The block costs on GPUs of a pace of their own: only times differ."""
        return self._on(self.machine.at_pace(pace), None)

    def on_hosts_of(self, cluster: ClusterSpec) -> BlockCosts:
        """The block costs on a cluster whose hosts alone differ: only times differ."""
        return self._on(self.machine.on_hosts_of(cluster), None)

    def _on(self, machine: OpTimingMachine, known_times: KnownTimes | None) -> BlockCosts:
        phases = BlockTimer(self.tapes, machine, known_times)

        def again(cost: BlockCost) -> BlockCost:
            return replace(cost, phases=phases)

        return replace(
            self, machine=machine, embedding=again(self.embedding), head=again(self.head),
            blocks={spec: tuple(map(again, kinds)) for spec, kinds in self.blocks.items()},
            mtp=None if self.mtp is None else {spec: again(cost) for spec, cost in self.mtp.items()},
        )  # fmt: skip

    @cached_property
    def kept_layer_extra_bytes(self) -> ArrayK:
        """What each kind of layer keeps more where it leaves on the device what others offload.
        (modes, K, kinds) [B]"""
        kinds = distinct_layer_kinds(self.context.model)
        more = [
            [
                cost.memories.memory_of((self.tapes[kept_layer_label(layer_label(kind, mode))],)).saved
                - cost.memory.saved
                for kind, cost in zip(kinds, costs, strict=True)
            ]
            for mode, costs in self.blocks.items()
        ]
        return np.moveaxis(np.array(more), 1, 2)

    @cached_property
    def combined_layer_times(self) -> dict[RecomputeSpec, list[list[TapeTime]]]:
        """Of each kind of layer the forward (first) beside the backward of each kind (second), by recomputation."""
        return {
            spec: [
                [forward.phases.combined_time(forward.blocks[0], backward.blocks[0]) for backward in kinds]
                for forward in kinds
            ]
            for spec, kinds in self.blocks.items()
        }

    @cached_property
    def combined_peak_bytes(self) -> tuple[ArrayK, ArrayK]:
        """The most that the forward of any kind of layer and the backward of each hold at once, and of what kinds.
        (modes, K, kinds), (modes, K, kinds, len(KINDS)) [B]"""
        num_k, delays = self.machine.num_k, self.machine.framework.delay_wgrad
        peaks, by_kind = [], []
        for kinds in self.blocks.values():
            for backward in kinds:
                each = [peak_bytes_of_layer_pair(f.blocks[0], backward.blocks[0], num_k, delays=delays) for f in kinds]
                largest = np.argmax([peak for peak, _ in each], axis=0)
                combination = np.arange(num_k)
                peaks.append(np.array([peak for peak, _ in each])[largest, combination])
                by_kind.append(np.array([of_kinds for _, of_kinds in each])[largest, :, combination])
        shape = len(self.blocks), -1, num_k
        return (
            np.moveaxis(np.reshape(peaks, shape), 2, 1).copy(),
            np.moveaxis(np.reshape(by_kind, (*shape, len(KINDS))), 2, 1).copy(),
        )

    @cached_property
    def _backward_halves(self) -> dict[str, tuple[TapeTime, TapeTime]]:
        """Each block's backward by inputs and by weights, as zero-bubble schedules run them."""
        return {name: times_of_backward_halves(block, self.machine) for name, block in self.tapes.items()}

    @cached_property
    def split_backward_clock_advances(self) -> dict[str, tuple[ArrayK, ArrayK]]:
        """Both clocks of those halves: rows of :class:`mofa.cost.block.host_clock.ClockAdvance`. (4, K) each [s]"""
        return {name: (inputs.clocks, weights.clocks) for name, (inputs, weights) in self._backward_halves.items()}

    @cached_property
    def split_backward_exposed_s(self) -> dict[str, ArrayK]:
        """What both halves leave exposed together under a host that begins far ahead. (len(EXPOSED), K) each [s]"""
        return {
            name: inputs.exposed_with_host_far_ahead_s + weights.exposed_with_host_far_ahead_s
            for name, (inputs, weights) in self._backward_halves.items()
        }

    @cached_property
    def split_backward_memories(self) -> dict[str, SplitBackwardMemory]:
        """Memory of each block's backward by weights, as those schedules run it."""
        return {name: split_backward_memory(block, self.machine.num_k) for name, block in self.tapes.items()}
