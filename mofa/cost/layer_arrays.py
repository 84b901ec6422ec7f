"""What blocks of each kind of layer cost in each mode of recomputation, stacked when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.costs import BlockCost
from mofa.cost.block.tape_clock import COMPUTED, EXPOSED

ArrayN = NDArray[np.float64]


@dataclass(frozen=True)
class LayerArrays:
    """Block costs of all modes and kinds, stacked when asked for: axes (modes, K) lead, then kinds and parts."""

    modes: list[tuple[BlockCost, ...]]

    def only_in_modes(self, used: Sequence[int]) -> LayerArrays:
        """The arrays in some of the modes alone: a used one stands in for each other, which is not costed."""
        return LayerArrays([self.modes[n if n in used else used[0]] for n in range(len(self.modes))])

    def stack_of_blocks(self, pick: Callable[[BlockCost], ArrayN]) -> ArrayN:
        """What is picked of each block. (modes, K, kinds, parts)"""
        array = np.array([[pick(cost) for cost in kinds] for kinds in self.modes])  # modes, kinds, parts, K
        return np.ascontiguousarray(array.transpose(0, -1, *range(1, array.ndim - 1)))

    @cached_property
    def exposed_by_family_s(self) -> ArrayN:
        """What of a layer each family exposes."""
        return self.stack_of_blocks(lambda c: c.forward.exposed + c.backward.exposed)

    @cached_property
    def hidden_by_family_s(self) -> ArrayN:
        """Communication of a layer that is hidden, by family."""
        return self.stack_of_blocks(lambda c: c.forward.hidden + c.backward.hidden)

    @cached_property
    def forward_s(self) -> ArrayN:
        """What a layer's forward takes. [s]"""
        return self.stack_of_blocks(lambda c: c.forward.total_s)

    @cached_property
    def backward_s(self) -> ArrayN:
        """What a layer's backward takes. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.total_s)

    @cached_property
    def issue_s(self) -> ArrayN:
        """What the host takes to issue a layer. [s]"""
        return self.stack_of_blocks(lambda c: c.forward.issue + c.backward.issue)

    @cached_property
    def weight_cast_issue_s(self) -> ArrayN:
        """What the host takes to issue the casts of a layer's weights to fp8. [s]"""
        return self.stack_of_blocks(lambda c: c.weight_cast_issue_s)

    @cached_property
    def layer_flops(self) -> ArrayN:
        """What a layer computes. [FLOP]"""
        return self.stack_of_blocks(lambda c: c.forward_flops + c.backward_flops)

    @cached_property
    def saved_bytes(self) -> ArrayN:
        """What a layer keeps for its backward. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.saved)

    @cached_property
    def saved_bytes_by_kind(self) -> ArrayN:
        """What a layer keeps, by kind of tensor. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.saved_kinds)

    @cached_property
    def saved_rounding_bytes(self) -> ArrayN:
        """What the allocator's rounding adds to kept tensors. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.saved_slack)

    @cached_property
    def forward_peak_bytes(self) -> ArrayN:
        """The most that a forward has alive. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.forward_peak)

    @cached_property
    def forward_peak_bytes_by_kind(self) -> ArrayN:
        """What is alive at the peak of a forward, by kind of tensor. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.forward_kinds)

    @cached_property
    def backward_peak_bytes(self) -> ArrayN:
        """The most that a backward has alive. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.backward_peak)

    @cached_property
    def backward_peak_bytes_by_kind(self) -> ArrayN:
        """What is alive at the peak of a backward, by kind of tensor. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.backward_kinds)

    @cached_property
    def pool_peaks_beyond_layer_peak_bytes(self) -> ArrayN:
        """Peaks of streams' memory pools beyond what is alive at the layer's peak. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.pool_slack)

    @cached_property
    def other_stream_pool_peak_bytes(self) -> ArrayN:
        """Peaks of the pools of all streams but the computing one. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.other_pools)

    @cached_property
    def largest_tensor_bytes(self) -> ArrayN:
        """The largest tensor. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.largest)

    @cached_property
    def saved_large_tensor_bytes(self) -> ArrayN:
        """Large tensors that a layer keeps, by size last. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.large_tensors_saved)

    @cached_property
    def forward_large_tensor_peak_bytes(self) -> ArrayN:
        """The most alive of large tensors in a forward, by size last. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.large_tensors_forward)

    @cached_property
    def large_tensor_peak_beyond_kept_bytes(self) -> ArrayN:
        """The most alive of large tensors beyond what is kept, by size last. [B]"""
        return self.stack_of_blocks(lambda c: c.memory.large_tensors_peak)

    @cached_property
    def nccl_freed_bytes_and_launches(self) -> ArrayN:
        """Bytes that wait for NCCL's stream, and launches: rows of
        :func:`mofa.cost.block.liveness.nccl_freed_bytes_and_launches` are the last axis."""
        return self.stack_of_blocks(lambda c: c.nccl_freed_bytes_and_launches)

    @cached_property
    def pinned_bytes(self) -> ArrayN:
        """Of the host, for a forward's copies there. [B]"""
        return self.stack_of_blocks(lambda c: c.pinned_bytes)

    @cached_property
    def copies_to_host_s(self) -> ArrayN:
        """Seconds of a forward's copies to the host. [s]"""
        return self.stack_of_blocks(lambda c: c.copies_to_host_s)

    @cached_property
    def watchdog_held_bytes(self) -> ArrayN:
        """Bytes that the watchdog holds, as :func:`mofa.cost.block.liveness.watchdog_held_bytes` has them last."""
        return self.stack_of_blocks(lambda c: c.watchdog_held_bytes)

    @cached_property
    def autocast_cached_bytes(self) -> ArrayN:
        """Of weight copies that autocast makes in a forward. [B]"""
        return self.stack_of_blocks(lambda c: c.autocast_cached_bytes)

    @cached_property
    def forward_clocks(self) -> ArrayN:
        """Rows of :class:`mofa.cost.block.host_clock.ClockAdvance` last."""
        return self.stack_of_blocks(lambda c: c.forward.clocks)

    @cached_property
    def backward_clocks(self) -> ArrayN:
        """Rows of :class:`mofa.cost.block.host_clock.ClockAdvance` last."""
        return self.stack_of_blocks(lambda c: c.backward.clocks)

    @cached_property
    def weight_backward_s(self) -> ArrayN:
        """The part of a layer's backward that makes weights' gradients. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.weights)

    @cached_property
    def backward_busy_s(self) -> ArrayN:
        """What of ``backward_s`` the compute stream does itself, copies of FSDP included. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.busy)

    @cached_property
    def backward_behind_experts_s(self) -> ArrayN:
        """What of ``backward_busy_s`` follows the last gradient of experts' weights. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.behind_experts)

    @cached_property
    def backward_slack_s(self) -> ArrayN:
        """What computing may lose in ``backward_s`` and make nothing later. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.slack)

    @cached_property
    def backward_hidden_s(self) -> ArrayN:
        """Communication that runs beside computing in ``backward_s``. [s]"""
        return self.stack_of_blocks(lambda c: c.backward.hidden.sum(axis=0))

    @cached_property
    def exposed_s(self) -> ArrayN:
        """All that is exposed of a layer. (modes, K, kinds) [s]"""
        return np.asarray(self.exposed_by_family_s.sum(axis=-1))

    @cached_property
    def forward_s_without_host_idle(self) -> ArrayN:
        """Seconds of a layer's forward without those in which the device waits for the host. (modes, K, kinds) [s]"""
        host = EXPOSED.index("host_idle")
        return self.stack_of_blocks(lambda c: c.forward.total_s - c.forward.exposed[host])

    @cached_property
    def attention_passes_s(self) -> tuple[ArrayN, ArrayN]:
        """What products of dense weights and attention take in a forward and a backward: with experts, next to all that
        is ahead of these in a forward and behind them in a backward. (modes, K, kinds) each [s]"""
        names = [EXPOSED.index(name) for name in ("gemm", "attention")]
        return (
            self.stack_of_blocks(lambda c: c.forward.exposed[names].sum(axis=0)),
            self.stack_of_blocks(lambda c: c.backward.exposed[names].sum(axis=0)),
        )

    @cached_property
    def computing_s(self) -> ArrayN:
        """What of it is computing on the slowest GPU, or a copy of weights and gradients. (modes, K, kinds) [s]"""
        return np.asarray(self.exposed_by_family_s[..., COMPUTED].sum(axis=-1))
