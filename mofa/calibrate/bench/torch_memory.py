"""Memory-bound operations of a block, of the loss and of the optimizer, as frameworks run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

from mofa.calibrate.bench.torch_timing import Call, RandomInputs, num_input_sets
from mofa.calibrate.cases import Case, UnsupportedCase
from mofa.specs.curves import TIMED_EMBEDDING_ROWS


def swiglu_output(a: Tensor, b: Tensor) -> Tensor:
    """SiLU of the gate times the up projection."""
    return F.silu(a) * b


def rope_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in halves, unfused, as Megatron-Core applies them."""
    first, second = torch.chunk(x, 2, dim=-1)
    return (x * cos) + (torch.cat((-second, first), dim=-1) * sin)


def rope_by_complex_numbers(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotary positions as complex numbers, as torchtitan applies them."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs).flatten(2).type_as(x)


def cross_entropy_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss in fp32 over bf16 logits."""
    return F.cross_entropy(logits.float(), labels)


def residual_sum_and_rmsnorm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Residual add and the norm that follows it."""
    total = x + y
    return total, F.rms_norm(total, (x.shape[-1],), weight)


def rmsnorm_output(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight)


def layernorm_output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm over the last dimension."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


class MemoryBoundCalls:
    """Builds the calls of a case; keeps compiled functions between cases."""

    def __init__(self, pool: RandomInputs) -> None:
        self.pool = pool
        self._compiled: dict[str, Callable[..., Any]] = {}
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.accumulated_recompile_limit = 4096
        torch._functorch.config.donated_buffer = False  # a backward is timed several times over one forward

    def build_calls(self, case: Case) -> list[Call]:
        """The calls of a case, over rotating inputs."""
        if "params" in case.shape:
            return [self._optimizer(case.op, case.shape_size("params"), case.shape_size("tensors"))]
        tokens, width = case.shape_size("tokens"), case.shape_size("width")
        sets = min(8, num_input_sets(2 * tokens * width))
        if "top_k" in case.shape:
            return [self._router(case.op, tokens, width, case.shape_size("top_k")) for _ in range(sets)]
        compiled = case.variant == "compiled"
        return [self._row(case.op, tokens, width, compiled=compiled) for _ in range(sets)]

    def _function(self, function: Callable[..., Any], *, compiled: bool) -> Callable[..., Any]:
        if not compiled:
            return function
        name = function.__name__
        if name not in self._compiled:
            self._compiled[name] = torch.compile(function, dynamic=False)
        return self._compiled[name]

    def _row(self, op: str, tokens: int, width: int, *, compiled: bool) -> Call:
        view, device = self.pool.random_tensor, self.pool.device
        backward = op.endswith("_bwd")
        base = op.removesuffix("_fwd").removesuffix("_bwd")
        x = view(tokens, width)
        if base in (
            "rmsnorm",
            "layernorm",
            "swiglu",
            "gelu",
            "add_rmsnorm",
            "cross_entropy",
            "residual_add",
            "rope_half",
        ):
            inputs, function = self._differentiable(base, x, tokens, width)
            function = self._function(function, compiled=compiled)
            if not backward:
                return lambda: function(*inputs)
            return self._backward(function, inputs)
        if base in ("cast_up", "cast_down"):
            source = view(tokens, width, dtype=torch.float32) if base == "cast_down" else x
            target = torch.bfloat16 if base == "cast_down" else torch.float32
            cast: Callable[..., Any] = (
                self._function(cast_to_fp32, compiled=True) if compiled else lambda t: t.to(target)
            )
            return lambda: cast(source)
        if op in ("silu", "mul", "dropout", "accumulate", "softmax_fp32"):
            y = view(tokens, width)
            wide = view(tokens, width, dtype=torch.float32) if op in ("accumulate", "softmax_fp32") else x
            return {
                "silu": lambda: F.silu(x), "mul": lambda: x * y, "dropout": lambda: F.dropout(x, 0.1, training=True),
                "accumulate": lambda: wide.add_(y, alpha=1e-6), "softmax_fp32": lambda: torch.softmax(wide, dim=-1),
            }[op]  # fmt: skip
        if op == "sum_rows":
            return lambda: x.sum(0)
        if op == "rope_complex":
            head = 128 if width % 128 == 0 else 64
            x = x.view(tokens, width // head, head)
            angles = torch.randn(tokens, 1, head // 2, device=device)
            freqs = torch.polar(torch.ones_like(angles), angles)
            return lambda: rope_by_complex_numbers(x, freqs)
        if op in ("permute", "unpermute", "embedding_bwd"):
            rows = torch.randperm(tokens, device=device)
            if op == "permute":
                return lambda: x[rows]
            if op == "embedding_bwd":
                labels = torch.randint(TIMED_EMBEDDING_ROWS, (tokens,), device=device)
                return lambda: torch.ops.aten.embedding_dense_backward(x, labels, TIMED_EMBEDDING_ROWS, -1, False)
            index = rows.reshape(-1, 1).expand(-1, width)
            return lambda: torch.zeros_like(x).scatter_add_(0, index, x)
        if op == "embedding":
            table = view(TIMED_EMBEDDING_ROWS, width)
            labels = torch.randint(TIMED_EMBEDDING_ROWS, (tokens,), device=device)
            return lambda: F.embedding(labels, table)
        raise UnsupportedCase(f"no such memory-bound op: {op}")

    def _differentiable(self, base: str, x: Tensor, tokens: int, width: int) -> tuple[list[Tensor], Callable[..., Any]]:
        view, device = self.pool.random_tensor, self.pool.device
        weight = torch.randn(width, device=device, dtype=torch.bfloat16)
        if base == "rmsnorm":
            return [x, weight], rmsnorm_output
        if base == "layernorm":
            return [x, weight, torch.randn_like(weight)], layernorm_output
        if base == "swiglu":
            return [x, view(tokens, width)], swiglu_output
        if base == "gelu":
            return [x], F.gelu
        if base == "add_rmsnorm":
            return [x, view(tokens, width), weight], residual_sum_and_rmsnorm
        if base == "residual_add":
            return [x, view(tokens, width)], residual_sum
        if base == "rope_half":
            head = 128 if width % 128 == 0 else 64
            angles = torch.randn(tokens, 1, head, device=device, dtype=torch.bfloat16)
            return [x.view(tokens, width // head, head), angles, angles.sin()], rope_by_halves
        return [x, torch.randint(width, (tokens,), device=device)], cross_entropy_loss

    def _backward(self, function: Callable[..., Any], inputs: list[Tensor]) -> Call:
        leaves = [t.detach().requires_grad_(True) if t.is_floating_point() else t for t in inputs]
        out = function(*leaves)
        gradient = self.pool.random_tensor(*out.shape) if out.dim() else torch.ones_like(out)
        wanted = [t for t in leaves if t.requires_grad]
        return lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True)

    def _router(self, op: str, tokens: int, experts: int, top_k: int) -> Call:
        logits = self.pool.random_tensor(tokens, experts, dtype=torch.float32)
        if op == "router_softmax":
            return lambda: torch.softmax(logits, dim=-1)
        return lambda: torch.topk(logits, top_k, dim=-1)

    def _optimizer(self, op: str, params: int, tensors: int) -> Call:
        def parts() -> list[Tensor]:
            return [self.pool.random_tensor(params // tensors, dtype=torch.float32) for _ in range(tensors)]

        if op.startswith("adam"):
            leaves = [p.clone().requires_grad_(True) for p in parts()]
            for leaf, gradient in zip(leaves, parts(), strict=True):
                leaf.grad = gradient
            mode = {"fused": True} if op == "adam_fused" else {"foreach": True}
            optimizer = torch.optim.AdamW(leaves, lr=1e-6, **mode)
            return lambda: optimizer.step()
        gradients = parts()
        if op == "grad_norm":
            return lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        scale = torch.ones((), device=self.pool.device)
        if op == "grad_clip":
            return lambda: torch._foreach_mul_(gradients, scale)
        copies = [g.clone() for g in gradients]
        return lambda: torch._foreach_zero_(copies)


def cast_to_fp32(x: Tensor) -> Tensor:
    """bf16 to fp32."""
    return x.float()


def residual_sum(x: Tensor, y: Tensor) -> Tensor:
    """Sum of two activations."""
    return x + y


def bytes_of_tensors(tensors: Iterable[Tensor]) -> int:
    """Bytes of several tensors. [B]"""
    return sum(t.numel() * t.element_size() for t in tensors)
