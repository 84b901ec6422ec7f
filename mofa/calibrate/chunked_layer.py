"""The bench's MoE layer as a tape, and what the planner's forms say of it: nothing here is fitted on its measurements.

`mofa.calibrate.bench.chunked_layer` op by op. The chunks are those of :mod:`mofa.blocks.chunks`, the backward is
derived from the forward, times are the profile's curves, bytes the tensors' lives: what a plan with ``token_chunks`` is
made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mofa.blocks.backward import derived_backward_tape
from mofa.blocks.build import BlockTapes
from mofa.blocks.chunks import split_into_token_chunks
from mofa.blocks.op import Op, OpBackward, Tape, TapeBuilder
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from mofa.blocks.work import Collective, Gemm, GroupedGemm, HostSync, MemoryBound
from mofa.calibrate.cases import Shape
from mofa.calibrate.shapes.chunked import token_rows_by_rank
from mofa.cost.allocations.allocation_trace import block_allocation_trace
from mofa.cost.allocations.block_trace import OpTrace
from mofa.cost.block.durations import OpTimingMachine
from mofa.cost.block.liveness import block_memory
from mofa.cost.block.tape_clock import time_per_tape_repetition
from mofa.cost.kernels.topology import ProcessGroup
from mofa.cost.memory.persistent_buffers import PYTORCH_WORKSPACE
from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.pools import Block
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec

REGION = "moe.chunk"
"""What a checkpoint holds where all tokens go in one chunk."""
BF16, FP32, INT64 = 2.0, 4.0, 8.0
SORT_BYTES = 256.0
"""A key of 64 bits beside a value of 64, read and written once for each of 8 digits. [B/key]"""
ACCUMULATE_BYTES = BF16 + 2 * FP32
"""A bf16 gradient read, the fp32 main one read and written. [B/param]"""
THREADS, STEPS = 2, 4
"""Threads with a workspace of cuBLAS, the caller's and autograd's; steps until the allocator's state repeats."""


@dataclass(frozen=True)
class ChunkedLayerPrediction:
    """One step of a layer on its slowest rank, and the memory of its fullest; each when it is asked for. [s, B]"""

    shape: Shape
    tapes: BlockTapes
    machine: OpTimingMachine

    @cached_property
    def forward_s(self) -> float:
        """Its forward, back to back."""
        return self._total_s(self.tapes.forward)

    @cached_property
    def backward_s(self) -> float:
        """Its backward, back to back."""
        return self._total_s(self.tapes.backward)

    @cached_property
    def step_s(self) -> float:
        """Both, as a step repeats them."""
        return self._total_s(_joined(self.tapes))

    @cached_property
    def static_bytes(self) -> float:
        """What is there before a step."""
        return layer_static_bytes(self.shape)

    @cached_property
    def peak_bytes(self) -> float:
        """The most that is allocated."""
        memory = block_memory(self.tapes, 1)
        out = BF16 * float(self.shape["tokens"]) * float(self.shape["hidden"])  # held until the step ends
        peak = THREADS * PYTORCH_WORKSPACE + max(float(memory.forward_peak[0]), float(memory.backward_peak[0]) + out)
        return self.static_bytes + peak

    @cached_property
    def reserved_bytes(self) -> float:
        """What the allocator reserves for it."""
        return _reserved(self.tapes, self.shape)

    def _total_s(self, tape: Tape) -> float:
        return float(time_per_tape_repetition(tape, self.machine).total_s[0])


def predict_bench_layer(shape: Shape, cluster: ClusterSpec, framework: FrameworkSpec) -> ChunkedLayerPrediction:
    """What the planner's forms say of a bench layer.

    Parameters
    ----------
    shape
        As in the CSV: ``tokens hidden ffn experts top_k ep chunks skew``.
    cluster, framework
        The machine as its profile has it, and a framework that issues ops one by one.
    """
    tape, chunks = layer_forward_tape(shape), int(shape["chunks"])
    forward = split_into_token_chunks(tape, chunks)
    recompute = Recompute("regions", checkpoint=frozenset({REGION})) if chunks == 1 else NO_RECOMPUTE
    tapes = BlockTapes("chunked_moe", forward, derived_backward_tape(forward, recompute))
    return ChunkedLayerPrediction(shape, tapes, _machine(int(shape["ep"]), cluster, framework))


def _joined(tapes: BlockTapes) -> Tape:
    """Forward and backward as one, as a step repeats them."""
    back = tapes.backward
    return Tape(tapes.forward.ops + back.ops, back.tensors, tapes.forward.inputs, back.outputs)


def _machine(ep: int, cluster: ClusterSpec, framework: FrameworkSpec) -> OpTimingMachine:
    size = np.array([ep])
    near = np.minimum(size, cluster.node.gpus_per_node)
    group = ProcessGroup(size, near, near)
    return OpTimingMachine(cluster, {"ep": group, "world": group}, framework, 1)


def static_tensor_bytes(shape: Shape) -> dict[str, float]:
    """Bytes of tensors that are there before a step: weights, main gradients, the gate, the inputs. [B]

    Examples
    --------
    >>> from mofa.calibrate.shapes.chunked import SMALL
    >>> static_tensor_bytes({**SMALL, "ep": 2, "chunks": 1, "skew": "0.0"})["w1"] == 4 * 2 * 16 * 32 * 2
    True
    """
    t, h, f, e = (float(shape[name]) for name in ("tokens", "hidden", "ffn", "experts"))
    local = e / float(shape["ep"])
    w1, w2 = local * 2 * f * h, local * f * h
    return {
        "gate": BF16 * e * h, "w1": BF16 * w1, "w2": BF16 * w2, "grad1": FP32 * w1, "grad2": FP32 * w2,
        "index": INT64 * e, "x": BF16 * t * h, "d_out": BF16 * t * h, "bias": FP32 * t * e,
    }  # fmt: skip


def layer_static_bytes(shape: Shape) -> float:
    """The sum of :func:`static_tensor_bytes`, and the gate's gradient, which stays. [B]"""
    tensors = static_tensor_bytes(shape)
    return sum(tensors.values()) + tensors["gate"]


def layer_forward_tape(shape: Shape) -> Tape:
    """The forward pass over all tokens in one piece, as the rank with the most rows sees it."""
    t, h, e, k = (float(shape[name]) for name in ("tokens", "hidden", "experts", "top_k"))
    f, ep = float(shape["ffn"]), float(shape["ep"])
    rows, copies, local = float(max(token_rows_by_rank(shape))), t * k, e / ep
    row, several = BF16 * h, ep > 1
    b = TapeBuilder()
    x = b.tensor("x", 0.0, grad_bytes=t * row)  # its bytes are static
    probs, chosen = _router(b, x, t, h, e, k)
    b.region = REGION
    rows_of, places, order = (b.tensor(name, INT64 * copies, grad=False) for name in ("rows", "places", "order"))
    b.add(Op("moe.permute", "memory_bound", MemoryBound((SORT_BYTES + 7 * INT64) * copies), (chosen,),
             (order, rows_of, places), scratch=3 * INT64 * copies, launches=14, routing="permute"))  # fmt: skip
    sent = b.tensor("sent", copies * row)
    spread = b.tensor("spread", 0.0, grad_bytes=copies * row)  # back, the copies' gradients are added
    b.add(Op("moe.spread", "memory_bound", None, (x, rows_of), (spread,), view=True, launches=0,
             back=OpBackward((copies + t) * row, 1, like="sum_copies")))  # fmt: skip
    b.add(Op("moe.rows", "memory_bound", MemoryBound(2 * copies * row, "gather_copies", source=t * row),
             (spread, rows_of, places), (sent,),
             (places,), autograd_functions=1, back=OpBackward(2 * copies * row, 1, like="permute")))  # fmt: skip
    received, frame_local = sent, ""
    if several:
        received = _dispatch(b, received, copies, rows, e, row, imbalance=rows / copies)
    out = _experts(b, received, rows, local, h, f)
    if several:
        ordered = b.tensor("unsorted", rows * row)
        out = b.add(_gather("moe.unsort", out, ordered, ("goes", "comes"), rows * row))
        frame_local = b.tensor("unsorted.held", rows * row, grad=False)  # a local variable of the chunk's function
        b.add(Op("moe.hold", "memory_bound", None, (out,), (frame_local,), view=True, launches=0))
        back = b.tensor("back", copies * row)
        work = Collective("all_to_all", "ep", copies * row, rows / copies)
        out = b.add(Op("moe.combine", "ep", work, (out,), (back,), stream="ep", autograd_functions=1))
    saved = (out, rows_of, places, order, probs)
    done = _combine(b, saved, (frame_local,) if several else (), copies * row, t * row)
    return b.tape((x,), (done,))


def _combine(b: TapeBuilder, saved: tuple[str, ...], alive: tuple[str, ...], rows: float, own: float) -> str:
    """Copies picked, weighted in place and added; one function, whose kernels are ops here.

    Back, the copies are picked again and multiplied with their token's gradient, which gives the probabilities'; the
    token's gradient is spread over its copies and weighted. ``rows`` and ``own`` are the bytes of copies and tokens.
    """
    y, rows_of, places, _, probs = saved
    picked, weighed, again = (
        b.tensor("picked", rows),
        b.tensor("weighed", 0.0, grad_bytes=rows),
        b.tensor("again", 0.0, grad_bytes=rows),
    )
    b.add(Op("moe.pick", "memory_bound", MemoryBound(2 * rows, "permute"), (y, rows_of, places), (picked,),
    autograd_functions=1,
             back=OpBackward(2 * rows, 1, like="gather_copies", source=own)))  # fmt: skip
    b.add(Op("moe.weigh", "memory_bound", MemoryBound(2 * rows, "weigh_copies"), (picked,), (weighed,), view=True,
             back=OpBackward(work=MemoryBound(2 * rows, "weigh_copies"), launches=1, view=True)))  # fmt: skip
    b.add(Op("moe.again", "memory_bound", None, (weighed,), (again,), view=True, launches=0,
             back=OpBackward(work=MemoryBound(2 * rows, "permute"), launches=1, view=True)))  # fmt: skip
    done = b.tensor("out", own, grad_bytes=0.0)  # its gradient is static
    work, reads = MemoryBound(rows + own, "sum_copies"), (again, probs, *alive)
    back = OpBackward(3 * rows + own, 2, like="dot_copies")
    return b.add(Op("moe.unpermute", "memory_bound", work, reads, (done,), saved, back=back, routing="unpermute"))


def _router(
    b: TapeBuilder, x: str, tokens: float, hidden: float, num_experts: float, top_k: float
) -> tuple[str, str]:  # fmt: skip
    """Logits, softmax in fp32, the biased top-k, the chosen probabilities normalised."""
    num_scores, num_chosen = tokens * num_experts, tokens * top_k
    logits = b.tensor("logits", BF16 * num_scores)
    b.add(Op("router.gate", "gemm", Gemm(tokens, num_experts, hidden), (x,), (logits,), (x,), weight="gate",
             weight_params=num_experts * hidden, weight_bytes=BF16 * num_experts * hidden,
             accumulate_bytes_per_param=3 * BF16))  # fmt: skip
    scores = b.tensor("scores", FP32 * num_scores)
    b.add(Op("router.softmax", "memory_bound", MemoryBound((BF16 + FP32) * num_scores, "router_softmax"), (logits,),
             (scores,), (scores,),
             back=OpBackward((BF16 + 2 * FP32) * num_scores, 1, like="router_softmax")))  # fmt: skip
    chosen = b.tensor("chosen", INT64 * num_chosen, grad=False)
    topk = MemoryBound(FP32 * num_scores, "router_topk", num_scores, num_experts)
    b.add(Op("router.topk", "memory_bound", topk, (scores,), (chosen,), scratch=FP32 * num_scores, launches=2))
    probs = b.tensor("probs", BF16 * num_chosen)
    picked = b.tensor("router.picked", 2 * FP32 * num_chosen, grad=False)
    b.add(Op("router.probs", "memory_bound", MemoryBound(32 * num_chosen), (scores, chosen), (probs, picked),
             (chosen, picked), launches=4,
             back=OpBackward(48 * num_chosen + 2 * FP32 * num_scores, 8)))  # fmt: skip
    return probs, chosen


def _gather(name: str, x: str, out: str, index: tuple[str, str], nbytes: float) -> Op:
    """Rows in another order, back by the inverse order, which is kept."""
    back = OpBackward(2 * nbytes, 1, like="permute")
    return Op(name, "memory_bound", MemoryBound(2 * nbytes, "permute"), (x, *index), (out,), index[1:],
    autograd_functions=1,
              back=back)  # fmt: skip


def _dispatch(
    b: TapeBuilder, x: str, copies: float, rows: float, num_experts: float, row: float, *, imbalance: float
) -> str:
    """Counts travel, the host reads them, rows travel and are put in order of experts."""
    all_counts = b.tensor("counts", INT64 * num_experts, grad=False)
    counts = Collective("all_to_all", "ep", INT64 * num_experts)
    b.add(Op("moe.counts", "ep", counts, ("rows",), (all_counts,), stream="ep"))
    b.add(Op("moe.sums", "memory_bound", MemoryBound(8 * INT64 * num_experts), (all_counts,), launches=4))
    b.add(Op("moe.sync", "host", HostSync()))
    goes, comes = (b.tensor(name, INT64 * rows, grad=False) for name in ("goes", "comes"))
    b.add(Op("moe.blocks", "memory_bound", MemoryBound(10 * INT64 * rows), (all_counts,), (goes, comes),
             scratch=2 * INT64 * rows, launches=18))  # fmt: skip
    got = b.tensor("received", rows * row)
    b.add(Op("moe.dispatch", "ep", Collective("all_to_all", "ep", copies * row, imbalance), (x,), (got,), stream="ep",
             autograd_functions=1, routing="dispatch"))  # fmt: skip
    ordered = b.tensor("sorted", rows * row)
    return b.add(_gather("moe.sort", got, ordered, ("comes", "goes"), rows * row))


def _experts(b: TapeBuilder, x: str, rows: float, local: float, hidden: float, expert_hidden: float) -> str:
    """Two grouped products around SwiGLU, whose kernels are a SiLU and products."""

    def product(name: str, source: str, n: float, k: float) -> str:
        out = b.tensor(f"{name}.out", BF16 * rows * n)
        return b.add(
            Op(name, "grouped_gemm", GroupedGemm(rows, local, n, k), (source,), (out,), (source,), autograd_functions=1,
               weight=name, weight_params=local * n * k, weight_bytes=BF16 * local * n * k,
               accumulate_bytes_per_param=ACCUMULATE_BYTES)
        )  # fmt: skip

    both = product("experts.fc1", x, 2 * expert_hidden, hidden)
    act, act_bytes = b.tensor("act", BF16 * rows * expert_hidden), BF16 * rows * expert_hidden
    back = OpBackward(11 * act_bytes, 4, scratch=act_bytes, like="swiglu_halves_bwd")
    b.add(Op("experts.act", "memory_bound", MemoryBound(5 * act_bytes, "swiglu_halves_fwd"), (both,), (act,), (both,),
             launches=2, autograd_functions=1, back=back))  # fmt: skip
    return product("experts.fc2", act, hidden, expert_hidden)


def _reserved(tapes: BlockTapes, shape: Shape) -> float:
    """What PyTorch's allocator reserves after some steps of the layer. [B]"""
    allocator = Allocator()
    for size in (*static_tensor_bytes(shape).values(), *(PYTORCH_WORKSPACE,) * THREADS):
        allocator.malloc(int(size))
    lived = block_allocation_trace(tapes)
    blocks: dict[str, Block] = {}
    for _ in range(STEPS):
        if lived.input_gradient in blocks:  # the input's gradient is let go before a step, the output after it
            allocator.free(blocks.pop(lived.input_gradient))
        for op_trace in (*lived.forward, *lived.backward):
            _do(op_trace, allocator, blocks)
        for name in [name for name in blocks if name != lived.input_gradient]:
            allocator.free(blocks.pop(name))
    return float(allocator.peak_reserved)


def _do(op_trace: OpTrace, allocator: Allocator, blocks: dict[str, Block]) -> None:
    """One op's allocations and frees."""
    scratch = [allocator.malloc(item.bytes) for item in op_trace.scratch]
    blocks.update({item.name: allocator.malloc(item.bytes) for item in op_trace.new})
    for block in scratch:
        allocator.free(block)
    for name in op_trace.free:
        if name in blocks:
            allocator.free(blocks.pop(name))
