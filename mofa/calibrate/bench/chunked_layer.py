"""One MoE layer in plain PyTorch whose tokens go through dispatch, experts and combine in chunks, each recomputed.

What `mofa.calibrate.chunked_layer` describes as a tape, op by op. Every rank routes its own tokens; the routing is
prescribed by a bias on the scores, so that each rank's load is known. Weight gradients are added to fp32 main ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mofa.calibrate.bench.torch_host import small_op_issue_s
from mofa.calibrate.cases import Case
from mofa.calibrate.shapes.chunked import ISSUE, token_copies_by_expert_of_rank

Tensor = torch.Tensor


class GatherRows(torch.autograd.Function):
    """Rows of a tensor in another order, each token's as often as it has copies; gradients of the copies are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor, copies: int) -> Tensor:
        """``x[rows]``; ``places`` says where each token's copies went."""
        ctx.save_for_backward(places)
        ctx.copies = copies
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The copies' gradients, gathered and summed."""
        (places,) = ctx.saved_tensors
        gathered = grads[0][places]
        if ctx.copies > 1:
            gathered = gathered.view(-1, ctx.copies, gathered.shape[-1]).sum(1)
        return gathered, None, None, None


class AllToAllRows(torch.autograd.Function):
    """An all-to-all of rows; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        """Send ``sent[r]`` rows to rank r and get ``received[r]`` of it."""
        ctx.splits, ctx.group = (sent, received), group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The same rows back."""
        sent, received = ctx.splits
        return _exchange(grads[0], received, sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class GroupedProduct(torch.autograd.Function):
    """The products of all experts in one kernel; the weight gradient is added to the main one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, main_grad: Tensor, ends: Tensor) -> Tensor:
        """``x`` (rows, k) by ``weight`` (experts, n, k); expert i's rows end at ``ends[i]``."""
        ctx.save_for_backward(x, ends)
        ctx.weight, ctx.main_grad = weight, main_grad
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Input gradient, then weight gradient."""
        x, ends = ctx.saved_tensors
        dx = torch._grouped_mm(grads[0], ctx.weight, offs=ends)
        ctx.main_grad.add_(torch._grouped_mm(grads[0].transpose(-2, -1), x, offs=ends))
        return dx, None, None, None


class SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` of one tensor that holds both; it alone is kept."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        """Two kernels, the second in place."""
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Both gradients into one tensor."""
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        d_both = torch.empty_like(both)
        d_gate, d_up = d_both.chunk(2, -1)
        work = F.silu(gate)
        torch.mul(grads[0], work, out=d_up)
        torch.mul(grads[0], up, out=work)
        torch.ops.aten.silu_backward.grad_input(work, gate, grad_input=d_gate)
        return d_both


class CombineTokens(torch.autograd.Function):
    """Each token's copies, weighted by the router's probabilities and added."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Tensor, places: Tensor, order: Tensor, probs: Tensor) -> Tensor:
        """``y`` (tokens * k, hidden) in order of experts; ``probs`` (tokens, k)."""
        ctx.save_for_backward(y, rows, places, order, probs)
        picked = y[places].view(*probs.shape, -1)
        return picked.mul_(probs[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The probabilities' gradients from the copies, the copies' from their token's."""
        y, rows, places, order, probs = ctx.saved_tensors
        picked = y[places].view(*probs.shape, -1)
        d_probs = picked.mul_(grads[0][:, None]).sum(-1)
        del picked
        dy = grads[0][rows].mul_(probs.reshape(-1)[order][:, None])
        return dy, None, None, None, d_probs


class BenchMoeLayer:
    """Router and experts of one rank, and what a step needs."""

    def __init__(self, case: Case, device: str, group: Any, rank: int) -> None:
        size = case.shape_size
        self.tokens, self.hidden, self.ffn = size("tokens"), size("hidden"), size("ffn")
        self.experts, self.top_k, self.ep = size("experts"), size("top_k"), size("ep")
        self.local, self.group, self.rank, self.device = self.experts // self.ep, group, rank, device
        self.gate = self._randn(self.experts, self.hidden, scale=0.02).requires_grad_(True)
        self.w1 = self._randn(self.local, 2 * self.ffn, self.hidden, scale=0.02)
        self.w2 = self._randn(self.local, self.hidden, self.ffn, scale=0.02)
        self.grad1, self.grad2 = (torch.zeros_like(w, dtype=torch.float32) for w in (self.w1, self.w2))
        self.experts_index = torch.arange(1, self.experts + 1, device=device)

    def _randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        out = torch.empty(shape, device=self.device, dtype=torch.bfloat16)
        for part in out.view(shape[0], -1).split(max(1, 2**28 * shape[0] // out.numel())):  # fp32 noise a part a time
            part.copy_(torch.randn(part.shape, device=self.device) * scale)
        return out

    def prepare_case(self, case: Case) -> None:
        """Inputs, the gradient of the output, and the bias that prescribes the routing of this case."""
        self.chunks = case.shape_size("chunks")
        self.x = self._randn(self.tokens, self.hidden).requires_grad_(True)
        self.d_out = self._randn(self.tokens, self.hidden, scale=1e-3)
        loads = torch.tensor(
            token_copies_by_expert_of_rank(self.tokens, self.top_k, self.experts, float(case.shape["skew"]))
        )
        copies = torch.repeat_interleave(torch.arange(self.experts), loads)  # copy j goes to token j modulo tokens
        generator = torch.Generator().manual_seed(self.rank)
        routes = copies.view(self.top_k, self.tokens).T[torch.randperm(self.tokens, generator=generator)]
        bias = torch.zeros(self.tokens, self.experts).scatter_(1, routes, 2.0)
        self.bias = bias.to(self.device)

    def forward(self) -> Tensor:
        """Router over all tokens, then chunk after chunk."""
        scores = torch.softmax(F.linear(self.x, self.gate), dim=-1, dtype=torch.float32)
        chosen = torch.topk(scores.detach() + self.bias, self.top_k)[1]
        probs = scores.gather(1, chosen)
        probs = (probs / probs.sum(-1, keepdim=True)).to(torch.bfloat16)
        if self.chunks == 1:
            out: Tensor = checkpoint(self._chunk, self.x, probs, chosen, use_reentrant=True, preserve_rng_state=False)
            return out
        each = self.tokens // self.chunks
        parts = zip(self.x.split(each), probs.split(each), chosen.split(each), strict=True)
        outs = [checkpoint(self._chunk, *part, use_reentrant=True, preserve_rng_state=False) for part in parts]
        return torch.cat(outs)

    def _chunk(self, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
        """Permute, dispatch, experts, combine of a part of the tokens; no tensor outlives its last use."""
        ordered, order = torch.sort(chosen.reshape(-1), stable=True)
        rows = order // self.top_k
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=self.device))
        upto = torch.searchsorted(ordered, self.experts_index)
        counts = torch.diff(upto, prepend=upto.new_zeros(1))
        x = GatherRows.apply(x, rows, places, self.top_k)
        if self.ep == 1:
            ends = upto.to(torch.int32)
            return CombineTokens.apply(self._experts(x, ends), rows, places, order, probs)
        got = torch.empty_like(counts)
        dist.all_to_all_single(got, counts, group=self.group)
        table = got.view(self.ep, self.local)
        sent, received = torch.stack((counts.view(self.ep, -1).sum(1), table.sum(1))).tolist()
        ends = table.sum(0).cumsum(0).to(torch.int32)
        # blocks of rows come by rank and expert and are wanted by expert and rank
        start = got.cumsum(0) - got
        wanted = (table.T.reshape(-1).cumsum(0) - table.T.reshape(-1)).view(self.local, self.ep).T.reshape(-1)
        index = torch.arange(sum(received), device=self.device)
        goes = index + torch.repeat_interleave(wanted - start, got, output_size=len(index))
        comes = torch.empty_like(goes).scatter_(0, goes, index)
        x = AllToAllRows.apply(x, sent, received, self.group)
        x = GatherRows.apply(x, comes, goes, 1)
        x = GatherRows.apply(self._experts(x, ends), goes, comes, 1)
        return CombineTokens.apply(AllToAllRows.apply(x, received, sent, self.group), rows, places, order, probs)

    def _experts(self, x: Tensor, ends: Tensor) -> Tensor:
        x = GroupedProduct.apply(x, self.w1, self.grad1, ends)
        x = SwiGLU.apply(x)
        return GroupedProduct.apply(x, self.w2, self.grad2, ends)

    def step(self, marks: Sequence[Any] | None = None) -> None:
        """Forward and backward; ``marks`` are three events: before, between and after."""
        self.x.grad = None
        if marks:
            marks[0].record()
        out = self.forward()
        if marks:
            marks[1].record()
        out.backward(self.d_out)
        if marks:
            marks[2].record()


WARM_S, MEASURED_S = 0.25, 0.35
"""A layer runs warm so long before it is timed, so that the clock is that of long runs, and is timed so long. [s]"""


def measure_layer_steps(layer: BenchMoeLayer, device: str) -> dict[str, list[float]]:
    """Every step's times [s] and peaks [B] of this rank, by the names of `mofa.calibrate.shapes.chunked.OPS`."""
    if device != "cuda":
        return _measure_host(layer)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    static = float(torch.cuda.memory_allocated())
    layer.step()
    first = _timed(layer, 2)
    each = _slowest(layer, statistics.median(first["step"]))
    _timed(layer, max(2, int(WARM_S / each)))
    torch.cuda.reset_peak_memory_stats()
    samples = _timed(layer, min(40, max(5, int(MEASURED_S / each))))
    num = len(samples["step"])
    samples["static_bytes"] = [static] * num
    samples["peak_bytes"] = [float(torch.cuda.max_memory_allocated())] * num
    samples["reserved_bytes"] = [float(torch.cuda.max_memory_reserved())] * num
    samples[ISSUE] = [small_op_issue_s(device)] * num  # last: its tensors are no part of the peaks
    return samples


def _timed(layer: BenchMoeLayer, num: int) -> dict[str, list[float]]:
    """So many steps back to back, as training runs them."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(num)]
    if layer.ep > 1:
        dist.barrier(group=layer.group)
    for three in marks:
        layer.step(three)
    torch.cuda.synchronize()
    spans = {"forward": (0, 1), "backward": (1, 2), "step": (0, 2)}
    return {name: [m[a].elapsed_time(m[b]) / 1e3 for m in marks] for name, (a, b) in spans.items()}


def _measure_host(layer: BenchMoeLayer) -> dict[str, list[float]]:
    import time

    samples: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}
    for _ in range(3):
        layer.x.grad = None
        before = time.perf_counter()
        out = layer.forward()
        between = time.perf_counter()
        out.backward(layer.d_out)
        after = time.perf_counter()
        for name, value in zip(samples, (between - before, after - between, after - before), strict=True):
            samples[name].append(value)
    return samples


def _slowest(layer: BenchMoeLayer, value: float) -> float:
    """The largest of all ranks' values."""
    if layer.ep == 1:
        return value
    shared = torch.tensor([value], device=layer.device, dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=layer.group)
    return float(shared.item())
