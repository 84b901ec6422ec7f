"""Memory-bound ops of Transformer Engine and of Megatron-Core 0.16.1's experts, each called by its own function.

Ops of the variant ``megatron`` are Megatron's own functions of eager kernels, those of ``te`` fused ones. Triton tunes
the permutations' kernels for each width, TorchDynamo compiles the activation for each: before a case they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mofa.calibrate.bench.torch_timing import Call, RandomInputs, num_input_sets
from mofa.calibrate.cases import Case, UnsupportedCase

GROUPS, GROUP_TOP = 8, 4
"""Groups of experts and how many of them a token takes, as DeepSeek-V3 has them."""


def te_memory_bound_calls(case: Case, pool: RandomInputs) -> list[Call]:
    """The calls of a memory-bound case of Transformer Engine, over rotating inputs."""
    if "params" in case.shape:
        return [_optimizer(case, pool)]
    make = next((make for start, make in MAKERS.items() if case.op.startswith(start)), None)
    if make is None:
        raise UnsupportedCase(f"no such op of Transformer Engine: {case.op}")
    elements = case.shape_size("tokens") * case.shape_size("width")
    return [make(case, pool) for _ in range(min(6, num_input_sets(4 * elements)))]


def _norm(case: Case, pool: RandomInputs) -> Call:
    from transformer_engine.pytorch.constants import TE_DType  # loads the core library, which the next one needs

    import transformer_engine_torch as tex  # isort: skip

    rows, width, layer = case.shape_size("tokens"), case.shape_size("width"), case.op.startswith("layernorm")
    x, weight, bias = pool.random_tensor(rows, width), pool.random_tensor(width), pool.random_tensor(width)
    affine = (weight, bias) if layer else (weight,)
    forward, backward = (
        (tex.layernorm_fwd, tex.layernorm_bwd) if layer else (tex.rmsnorm_fwd, tex.rmsnorm_bwd)
    )  # fmt: skip

    def call() -> Any:
        return forward(x, *affine, 1e-5, None, None, TE_DType[torch.bfloat16], 0, False)

    if case.op.endswith("_fwd"):
        return call
    _, mean, scale = call()
    grad = pool.random_tensor(rows, width)
    statistics = (mean, scale) if layer else (scale,)
    return lambda: backward(grad, x, *statistics, weight, 0, False)


def _rope(case: Case, pool: RandomInputs) -> Call:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    rows, heads, head = case.shape_size("tokens"), case.shape_size("width") // 128, 128
    t = pool.random_tensor(rows, 1, heads, head).detach().requires_grad_(case.op.endswith("_bwd"))
    angles = torch.randn(rows, 1, 1, head, device=pool.device)

    def call() -> Any:
        return apply_rotary_pos_emb(t, angles, tensor_format="sbhd", fused=True)

    if case.op.endswith("_fwd"):
        return call
    return _again(call(), (t,), pool.random_tensor(rows, 1, heads, head))


def _mla(case: Case, pool: RandomInputs) -> Call:
    from megatron.core.fusions import fused_mla_yarn_rope_apply as mla

    rows, heads = case.shape_size("tokens"), case.shape_size("heads")
    cos, sin = (torch.randn(rows, 1, 1, 64, device=pool.device) for _ in range(2))
    if case.op.startswith("mla_q"):
        q = pool.random_tensor(rows, 1, heads, 192)
        return lambda: mla.fused_apply_mla_rope_for_q(q, cos, sin, 128, 64)
    kv, k_pe = pool.random_tensor(rows, 1, heads, 256), pool.random_tensor(rows, 1, 1, 64)
    return lambda: mla.fused_apply_mla_rope_for_kv(kv, k_pe, cos, sin, 64, 128, 128)


def _chunk_order(case: Case, pool: RandomInputs) -> Call:
    """Keys or values of all context-parallel ranks, gathered, in the sequence's order: two chunks of each rank."""
    chunks, rows, width = case.shape_size("chunks"), case.shape_size("tokens"), case.shape_size("width")
    x = pool.random_tensor(rows, width).view(chunks, rows // chunks, 1, width)
    order = torch.tensor([*range(0, chunks, 2), *range(chunks - 1, 0, -2)], device=pool.device, dtype=torch.int32)
    return lambda: torch.index_select(x, dim=0, index=order)


def _routing_map(tokens: int, experts: int, top_k: int, device: str) -> torch.Tensor:
    chosen = torch.rand(tokens, experts, device=device).topk(top_k, dim=1).indices
    return torch.zeros(tokens, experts, device=device, dtype=torch.int32).scatter_(1, chosen, 1).bool()


def _permutation(case: Case, pool: RandomInputs) -> Call:
    from transformer_engine.pytorch.triton import permutation as triton_permutation

    if case.op == "row_map":
        tokens, experts = case.shape_size("tokens"), case.shape_size("width")
        routing = _routing_map(tokens, experts, min(case.shape_size("top_k"), experts), pool.device)
        return lambda: triton_permutation.make_row_id_map(routing, tokens, experts)
    rows, hidden, experts, top_k = (case.shape_size(x) for x in ("tokens", "width", "experts", "top_k"))
    tokens = rows // top_k
    routing = _routing_map(tokens, experts, top_k, pool.device)
    x, copies = pool.random_tensor(tokens, hidden), pool.random_tensor(rows, hidden)
    scores = pool.random_tensor(tokens, experts, dtype=torch.float32)
    of_copies = pool.random_tensor(rows, dtype=torch.float32)
    if case.op.startswith("sort"):
        counts, order = routing.sum(0), torch.arange(experts, device=pool.device)
        forward = case.op.endswith("_fwd")
        if forward:  # as Megatron calls it: the map is made with it
            return lambda: triton_permutation.sort_chunks_by_map(
                copies, triton_permutation.make_chunk_sort_map(counts, order, rows, experts), of_copies, rows, hidden,
                is_forward=True,
            )  # fmt: skip
        row_map = triton_permutation.make_chunk_sort_map(counts, order, rows, experts)
        return lambda: triton_permutation.sort_chunks_by_map(copies, row_map, of_copies, rows, hidden, is_forward=False)
    row_map = triton_permutation.make_row_id_map(routing, tokens, experts)
    if case.op in ("permute_fwd", "unpermute_bwd"):
        given = scores if case.op == "permute_fwd" else None
        return lambda: triton_permutation.permute_with_mask_map(
            x, row_map, given, None, None, tokens, experts, rows, hidden, None
        )
    back = of_copies if case.op == "permute_bwd" else None
    return lambda: triton_permutation.unpermute_with_mask_map(
        copies, row_map, None, back, None, tokens, experts, hidden
    )


def _router(case: Case, pool: RandomInputs) -> Call:
    from megatron.core.transformer.moe import moe_utils

    tokens, experts, top_k = case.shape_size("tokens"), case.shape_size("width"), case.shape_size("top_k")
    score, fused = case.op.removeprefix("router_").rpartition("_")[0], case.variant == "te"
    grouped, sigmoid = score == "grouped_sigmoid", score.endswith("sigmoid")
    if grouped and experts < GROUPS * 4:
        raise UnsupportedCase("too few experts for groups")
    logits = torch.randn(tokens, experts, device=pool.device, requires_grad=True)
    bias = torch.zeros(experts, device=pool.device) if sigmoid else None

    def call() -> Any:
        return moe_utils.topk_routing_with_score_function(
            logits, top_k, use_pre_softmax=score == "presoftmax", num_groups=GROUPS if grouped else None,
            group_topk=GROUP_TOP if grouped else None, scaling_factor=2.5 if sigmoid else None,
            score_function="sigmoid" if sigmoid else "softmax", expert_bias=bias, fused=fused,
        )  # fmt: skip

    if case.op.endswith("_fwd"):
        return call
    return _again(call()[0], (logits,), torch.randn(tokens, experts, device=pool.device))


def _drop(case: Case, pool: RandomInputs) -> Call:
    """Scores and map of the tokens within an even share of each expert, padded to it."""
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

    tokens, experts, top_k = case.shape_size("tokens"), case.shape_size("width"), case.shape_size("top_k")
    routing = _routing_map(tokens, experts, top_k, pool.device)
    scores = (torch.rand(tokens, experts, device=pool.device) * routing).requires_grad_(True)

    def call() -> Any:
        return apply_router_token_dropping(scores, routing, top_k, 1.0, pad_to_capacity=True)

    if case.op.endswith("_fwd"):
        return call
    return _again(call()[0], (scores,), torch.randn(tokens, experts, device=pool.device))


def _aux_loss(case: Case, pool: RandomInputs) -> Call:
    """Scores and map for the loss, the experts' tokens, the loss."""
    from megatron.core.transformer.moe import moe_utils

    tokens, experts, top_k = case.shape_size("tokens"), case.shape_size("width"), case.shape_size("top_k")
    fused = case.variant == "te"
    logits = torch.randn(tokens, experts, device=pool.device, requires_grad=True)

    def call() -> Any:
        routing, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, top_k, "softmax", fused=fused)
        return moe_utils.switch_load_balancing_loss_func(
            scores, routing.sum(dim=0), tokens, top_k, experts, 1e-3, fused=fused
        )

    if case.op.endswith("_fwd"):
        return call
    out = call()
    return _again(out, (logits,), torch.ones_like(out))


def _gate(case: Case, pool: RandomInputs) -> Call:
    from megatron.core.transformer.moe import moe_utils

    tokens, width, experts = case.shape_size("tokens"), case.shape_size("width"), case.shape_size("experts")
    x = pool.random_tensor(tokens, width).detach().requires_grad_(True)
    weight = pool.random_tensor(experts, width).detach().requires_grad_(True)

    def call() -> Any:
        return moe_utils.router_gating_linear(x, weight, None, torch.float32)

    if case.op.endswith("_fwd"):
        return call
    return _again(call(), (x, weight), torch.randn(tokens, experts, device=pool.device))


_compiled_width: list[int] = []


def _weighted_swiglu(case: Case, pool: RandomInputs) -> Call:
    """Compiled for one width and any number of rows, as a rank's is that has met two of them."""
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    rows, width = case.shape_size("tokens"), case.shape_size("width")

    def inputs(num: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = pool.random_tensor(num, 2 * width).detach().requires_grad_(True)
        return x, torch.rand(num, 1, device=pool.device, requires_grad=True)

    if _compiled_width != [width]:
        torch._dynamo.reset()
        _compiled_width[:] = [width]
        for num in (1000, 2040):
            x, scores = inputs(num)
            weighted_bias_swiglu_impl(x, None, scores).sum().backward()
    x, scores = inputs(rows)

    def call() -> Any:
        return weighted_bias_swiglu_impl(x, None, scores)

    if case.op.endswith("_fwd"):
        return call
    return _again(call(), (x, scores), pool.random_tensor(rows, width))


def _swiglu(case: Case, pool: RandomInputs) -> Call:
    """Of a dense layer, compiled for its one shape; the halves lie beside each other in the input."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    rows, width = case.shape_size("tokens"), case.shape_size("width")
    torch._dynamo.reset()
    _compiled_width.clear()
    x = pool.random_tensor(rows, 1, 2 * width).detach().requires_grad_(True)

    def call() -> Any:
        return bias_swiglu_impl(x, None)

    if case.op.endswith("_fwd"):
        return call
    return _again(call(), (x,), pool.random_tensor(rows, 1, width))


def _fused_activation(case: Case, pool: RandomInputs) -> Call:
    """GeGLU, the squared ReLU and GeLU behind a bias, of a dense layer, compiled for one shape as :func:`_swiglu` is.

    The sum of a bias' gradient over the rows is autograd's own kernel and not timed here.
    """
    import torch._functorch.config
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    rows, width, name = case.shape_size("tokens"), case.shape_size("width"), case.op.rsplit("_", 1)[0]
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # the kept forward's backward runs again and again
    _compiled_width.clear()
    x = pool.random_tensor(rows, 1, width * (2 if name == "geglu" else 1)).detach().requires_grad_(True)
    bias = pool.random_tensor(width).detach()

    def call() -> Any:
        if name == "geglu":
            return bias_geglu_impl(x, None)
        return bias_gelu_impl(x, bias) if name == "bias_gelu" else squared_relu(x)

    if case.op.endswith("_fwd"):
        return call
    return _again(call(), (x,), pool.random_tensor(rows, 1, width))


def _again(out: torch.Tensor, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor) -> Call:
    """The backward pass of one kept forward."""
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _optimizer(case: Case, pool: RandomInputs) -> Call:
    """Transformer Engine's Adam over fp32 parameters as the distributed optimizer has them, the norm, the scaling."""
    from transformer_engine.pytorch.optimizers import (
        FusedAdam,
        multi_tensor_applier,
        multi_tensor_l2norm,
        multi_tensor_scale,
    )

    num = case.shape_size("tensors")
    each = case.shape_size("params") // num
    device = pool.device
    grads = [torch.full((each,), 1e-3, device=device) for _ in range(num)]
    flag = torch.zeros(1, dtype=torch.int, device=device)
    if case.op == "grad_norm":
        return lambda: multi_tensor_applier(multi_tensor_l2norm, flag, [grads], False)
    if case.op == "grad_clip":
        return lambda: multi_tensor_applier(multi_tensor_scale, flag, [grads, grads], 0.999)
    if case.op == "zero_buffer":
        buffer = torch.empty(case.shape_size("params"), device=device)
        return buffer.zero_
    if case.op != "adam":
        raise UnsupportedCase(f"no such op of an optimizer: {case.op}")
    params = [torch.nn.Parameter(torch.zeros(each, device=device)) for _ in range(num)]
    for parameter, grad in zip(params, grads, strict=True):
        parameter.grad = grad
    optimizer = FusedAdam(params, lr=1e-4, weight_decay=0.1)
    return lambda: optimizer.step()


def _loss(case: Case, pool: RandomInputs) -> Call:
    """Megatron's cross entropy on one rank, eager or compiled, by its autograd function's two halves.

    Behind the eager half back autograd casts the gradient to the logits' bf16, behind the compiled one its own kernels.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    if case.op.startswith("compiled"):
        from megatron.core.fusions.fused_cross_entropy import _VocabParallelCrossEntropy as Loss

        last: Any = parallel_state.get_tensor_model_parallel_group()
    else:
        from megatron.core.tensor_parallel.cross_entropy import _VocabParallelCrossEntropy as Loss

        last = 0.0  # its label smoothing
    rows, vocab = case.shape_size("tokens"), case.shape_size("width")
    logits, grad = pool.random_tensor(rows, 1, vocab), torch.ones(rows, 1, device=pool.device)
    targets = torch.randint(vocab, (rows, 1), device=pool.device)
    context = _SavedForBackward()

    def forward() -> Any:
        with torch.no_grad():
            return Loss.forward(context, logits, targets, last)

    def backward() -> Any:
        with torch.no_grad():
            return Loss.backward(context, grad)[0].to(torch.bfloat16)

    forward()
    return forward if case.op.endswith("_fwd") else backward


class _SavedForBackward:
    """Stands in for autograd's context."""

    saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


MAKERS: dict[str, Callable[[Case, RandomInputs], Call]] = {
    "rmsnorm": _norm, "layernorm": _norm, "rope": _rope, "mla": _mla, "row_map": _permutation, "permute": _permutation,
    "unpermute": _permutation, "sort": _permutation, "router_gate": _gate, "router_drop": _drop,
    "router": _router, "aux_loss": _aux_loss,
    "weighted_swiglu": _weighted_swiglu, "swiglu": _swiglu, "chunk_order": _chunk_order,
    "loss": _loss, "compiled_loss": _loss,
    "geglu": _fused_activation, "squared_relu": _fused_activation, "bias_gelu": _fused_activation,
}  # fmt: skip
"""Which function makes the calls of an op, by how its name begins; the first that fits."""
