"""Chains of Transformer Engine's modules as Megatron-Core calls them, for :mod:`mofa.calibrate.bench.te_host`."""

from __future__ import annotations

import importlib.metadata
import random
import sys
import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from mofa import host_pace
from mofa.calibrate.bench.te_timing import Chain, Recorder, label_of, that_count, time_chain

TOKENS, WIDTH, HEADS = 128, 256, 4
NUM = 16
"""Modules in a chain."""
Todo = list[tuple[str, Callable[[], None]]]
Timing = tuple[str, Callable[..., None], tuple[Any, ...], dict[str, Any]]
EXPERTS = (1, 2, 4, 8, 16, 32, 64, 128)
RECIPES = {"fp8-delayed": ("delayed", "hybrid"), "fp8-tensorwise": ("tensorwise", "hybrid"),
           "fp8-blockwise": ("blockwise", "e4m3")}  # fmt: skip
PADDED_ROWS = 16
"""Multiple that experts' rows are padded to in fp8 (megatron/core/fp8_utils.py, ``get_fp8_align_size``). [rows]"""


def versions() -> dict[str, str]:
    """Releases of what is timed."""
    found = {}
    for name in ("transformer-engine", "transformer_engine", "megatron-core", "triton"):
        try:
            found[name.replace("_", "-")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _gradient_addition() -> None:
    """Stands in for Apex's kernel of the output layer's weight gradient: Transformer Engine's product adds it."""
    module = types.ModuleType("fused_weight_gradient_mlp_cuda")

    def add(inputs: Any, grad: Any, main_grad: Any) -> None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(inputs, grad, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)

    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = add  # type: ignore[attr-defined]
    sys.modules["fused_weight_gradient_mlp_cuda"] = module


def start(gpus: int, parallel: dict[str, int]) -> None:
    """Megatron's process groups of these degrees, anew where there were others."""
    if "fused_weight_gradient_mlp_cuda" not in sys.modules:
        _gradient_addition()
    from megatron.core import parallel_state, tensor_parallel

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**parallel, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def config_of(**changes: Any) -> Any:
    """Megatron's configuration of a small layer, with every fusion that its training script has on."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    values = {
        "num_layers": 2, "hidden_size": WIDTH, "ffn_hidden_size": 2 * WIDTH, "num_attention_heads": HEADS,
        "num_query_groups": 2, "kv_channels": WIDTH // HEADS, "gated_linear_unit": True, "activation_func": F.silu,
        "add_bias_linear": False, "normalization": "RMSNorm", "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "bias_activation_fusion": True, "bias_dropout_fusion": True, "apply_rope_fusion": True,
        "gradient_accumulation_fusion": True, "bf16": True, "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16, "deallocate_pipeline_outputs": True,
    } | changes  # fmt: skip
    latent = values.get("multi_latent_attention")
    return (MLATransformerConfig if latent else TransformerConfig)(**values)


def _leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).mul_(0.1).requires_grad_(True)


def main_grads(modules: Sequence[Any], *, fused: bool = True) -> list[torch.Tensor]:
    """Parameters of modules, each with the fp32 gradient that Megatron's buffers hold."""
    found = [p for module in modules for p in module.parameters()]
    for p in found:
        if fused:
            p.main_grad = torch.zeros(p.shape, device="cuda", dtype=torch.float32)
            p.grad_added_to_main_grad = False
    return found


def _column(config: Any) -> Any:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    return TEColumnParallelLinear(
        WIDTH, WIDTH, config=config, init_method=config.init_method, gather_output=False, bias=False,
        skip_bias_add=False, is_expert=False, tp_comm_buffer_name="qkv",
    ).cuda()  # fmt: skip


def _row(config: Any) -> Any:
    from megatron.core.extensions.transformer_engine import TERowParallelLinear

    return TERowParallelLinear(
        WIDTH, WIDTH, config=config, init_method=config.init_method, bias=False, input_is_parallel=True,
        skip_bias_add=False, is_expert=False, tp_comm_buffer_name="proj",
    ).cuda()  # fmt: skip


def _norm_linear(config: Any) -> Any:
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    return TELayerNormColumnParallelLinear(
        WIDTH, WIDTH, config=config, init_method=config.init_method, gather_output=False, bias=False,
        skip_bias_add=False, is_expert=False, tp_comm_buffer_name="qkv",
    ).cuda()  # fmt: skip


def _duplicated(config: Any) -> Any:
    from megatron.core.extensions.transformer_engine import TELinear

    return TELinear(
        WIDTH, WIDTH, parallel_mode="duplicated", config=config, init_method=config.init_method, bias=False,
        skip_bias_add=False, skip_weight_param_allocation=False,
    ).cuda()  # fmt: skip


def _norm(config: Any) -> Any:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm(config, WIDTH).cuda()


def _grouped(config: Any, experts: int, width: int = WIDTH, out: int = WIDTH) -> Any:
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    return TEGroupedLinear(
        experts, width, out, parallel_mode="column", config=config, init_method=config.init_method, bias=False,
        skip_bias_add=False, is_expert=True, tp_comm_buffer_name="fc1",
    ).cuda()  # fmt: skip


def _autocast(recipe: str) -> tuple[Any, Callable[[], Any]]:
    """A configuration with a recipe of fp8, and its context."""
    from megatron.core.fp8_utils import get_fp8_context

    if recipe == "bf16":
        config = config_of()
        return config, lambda: get_fp8_context(config)
    name, form = RECIPES[recipe]
    config = config_of(fp8=form, fp8_recipe=name)
    return config, lambda: get_fp8_context(config)


def _first(layers: Sequence[Any], first: bool) -> Callable[[], None]:
    """Say of layers whether the next micro-batch is a step's first, which casts weights to fp8."""

    def say() -> None:
        for layer in layers:
            layer.is_first_microbatch = first

    return say


def linears(recorder: Recorder, op: str, make: Callable[[Any], Any], recipe: str, *, first: bool, fused: bool) -> None:
    """A chain of linears or norms of one kind."""
    config, around = _autocast(recipe)
    config.gradient_accumulation_fusion = fused
    layers = [make(config) for _ in range(NUM)]
    plain = make is _norm
    steps = layers if plain else [lambda x, layer=layer: layer(x)[0] for layer in layers]
    sizes = {"first": int(first), "fused": int(fused)}
    chain = Chain(
        steps, [_leaf(TOKENS, 1, WIDTH)], main_grads(layers, fused=fused), around,
        before=None if plain else _first(layers, first), sizes=sizes, dtype=recipe,
    )  # fmt: skip
    time_chain(op, chain, recorder)


def grouped(recorder: Recorder, experts: int, recipe: str, *, first: bool, fused: bool) -> None:
    """A chain of grouped linears."""
    config, around = _autocast(recipe)
    config.gradient_accumulation_fusion = fused
    num = max(2, min(NUM, 256 // experts))
    layers = [_grouped(config, experts) for _ in range(num)]
    splits = [16 if recipe == "bf16" else 128] * experts
    steps = [lambda x, layer=layer: layer(x, splits)[0] for layer in layers]
    sizes = {"experts": experts, "first": int(first), "fused": int(fused)}
    chain = Chain(
        steps, [_leaf(sum(splits), WIDTH)], main_grads(layers, fused=fused), around, before=_first(layers, first),
        sizes=sizes, dtype=recipe,
    )  # fmt: skip
    time_chain("grouped_linear", chain, recorder)


def new_rows(recorder: Recorder, experts: int, recipe: str = "bf16", width: int = 1024, fresh: int = 0) -> None:
    """A grouped linear whose experts get numbers of tokens that none had before, and then the same once more.

    Numbers lie around one mean in pairs, so that all rounds take the same bytes; in fp8 they are padded as Megatron
    does. Where only ``fresh`` experts get new ones, these lie among others whose numbers stay. The output's width is
    the case's own, and not the input's: no product of another case or way has its shape.
    """
    config, around = _autocast(recipe)
    layer = _grouped(config, experts, width, width + 16 * (100 * bool(fresh) + experts + fresh))
    parameters = main_grads([layer])
    num_rounds, dropped = (24, 4) if recipe == "bf16" else (16, 6)
    multiple = 1 if recipe == "bf16" else PADDED_ROWS
    each = (fresh or experts) // 2
    row_counts = [multiple * (i + 1) for i in range(num_rounds * each)]
    random.Random(experts).shuffle(row_counts)
    tokens = 1024 + multiple * len(row_counts)
    source = _leaf(experts * tokens, width)
    beside, names = host_pace.EngineLayer(), ("grouped_new_rows", "grouped_seen_rows")
    times: dict[str, tuple[list[float], list[float], list[bool]]] = {name: ([], [], []) for name in names}
    for turn in range(num_rounds):
        moved = row_counts[turn * each : (turn + 1) * each]
        splits, new = [tokens] * experts, [tokens + way * n for n in moved for way in (1, -1)]
        splits[:: experts // len(new)] = new
        for name in times:
            for x in (source, *parameters):
                x.grad = None
            _first([layer], True)()
            settled = recorder.cores.settle()
            ahead_scale, behind_scale = recorder.pace.over(beside.seconds(5))
            with around():
                began = time.perf_counter()
                out = layer(source, splits)[0]
                times[name][0].append(ahead_scale * (time.perf_counter() - began))
            grad = torch.ones_like(out)
            torch.cuda.synchronize()
            began = time.perf_counter()
            out.backward(grad)
            times[name][1].append(behind_scale * (time.perf_counter() - began))
            torch.cuda.synchronize()
            times[name][2].append(settled and recorder.cores.still_quiet())
    recorder.cores.release()
    sizes = {"ops": 1, "experts": experts, "width": width} | ({"fresh": fresh} if fresh else {})
    for name, (forward, backward, quiet) in times.items():
        ahead = recorder.row(name, "fwd", recipe, sizes, [forward[i] for i in that_count(forward, quiet, dropped)])
        behind = recorder.row(name, "bwd", recipe, sizes, [backward[i] for i in that_count(backward, quiet, dropped)])
        recorder.pace_rows(name, recipe, sizes)
        if recorder.writes:
            label = label_of(name, recipe, sizes)
            print(f"{label:58s} {ahead.median_s * 1e6:8.1f} {behind.median_s * 1e6:8.1f} us", flush=True)


def attention(recorder: Recorder, groups: int) -> None:
    """A chain of core attentions, whose keys and values are constant."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = config_of(num_query_groups=groups)
    layer = TEDotProductAttention(config, 1, AttnMaskType.causal, "self")
    k, v = (torch.randn(TOKENS, 1, groups, WIDTH // HEADS, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step(x: Any) -> Any:
        q = x.view(TOKENS, 1, HEADS, WIDTH // HEADS)
        return layer(q, k, v, None, attn_mask_type=AttnMaskType.causal)

    time_chain("attention", Chain([step] * NUM, [_leaf(TOKENS, 1, WIDTH)], sizes={"groups": groups}), recorder)


def functions(recorder: Recorder, op: str) -> None:
    """Fused functions: rotary embedding, SwiGLU, bias-dropout-add, checkpoints."""
    from megatron.core import tensor_parallel
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl

    x = _leaf(TOKENS, 1, WIDTH)
    if op == "rope":
        freqs = torch.randn(TOKENS, 1, 1, WIDTH // HEADS, device="cuda")
        step = lambda t: fused_apply_rotary_pos_emb(t, freqs)  # noqa: E731
        chain = Chain([step] * NUM, [_leaf(TOKENS, 1, HEADS, WIDTH // HEADS)])
    elif op == "bias_dropout_add":
        other = torch.ones_like(x)
        chain = Chain([lambda t: bias_dropout_add_fused_train((t, None), other, 0.0)] * NUM, [x])
    elif op == "swiglu":
        sources = [_leaf(TOKENS, 1, 2 * WIDTH) for _ in range(NUM)]
        chain = Chain([lambda t: bias_swiglu_impl(t, None)] * NUM, sources, separate=True)
    elif op == "weighted_swiglu":
        sources = [_leaf(TOKENS, 2 * WIDTH) for _ in range(NUM)]
        weights = [_leaf(TOKENS, 1, dtype=torch.float32) for _ in range(NUM)]
        steps = [lambda t, w=w: weighted_bias_swiglu_impl(t, None, w) for w in weights]
        chain = Chain(steps, sources, weights, separate=True)
    elif op == "checkpoint":
        chain = Chain([lambda t: tensor_parallel.checkpoint(F.silu, False, t)] * NUM, [x])
    elif op == "silu":
        chain = Chain([F.silu] * NUM, [x])
    elif op == "torch_linear":
        weights = [_leaf(WIDTH, WIDTH) for _ in range(NUM)]
        chain = Chain([lambda t, w=w: F.linear(t, w) for w in weights], [x], weights)
    else:
        raise ValueError(op)
    time_chain(op, chain, recorder)


def routing(recorder: Recorder, op: str, experts: int, top_k: int = 2) -> None:
    """Router, permutation and sorting of tokens."""
    from megatron.core.transformer.moe import moe_utils

    tokens = 512
    logits = [_leaf(tokens, experts, dtype=torch.float32) for _ in range(NUM)]
    sizes = {"experts": experts}
    if op in ("router_topk", "router_topk_fused"):
        fused = op.endswith("fused")
        step = lambda x: moe_utils.topk_routing_with_score_function(x, top_k, fused=fused)[0]  # noqa: E731
        time_chain(op, Chain([step] * NUM, logits, separate=True, sizes=sizes), recorder)
        return
    if op == "router_scores_fused":
        step = lambda x: moe_utils.compute_routing_scores_for_aux_loss(x, top_k, "softmax", fused=True)[1]  # noqa: E731
        time_chain(op, Chain([step] * NUM, logits, separate=True, sizes=sizes), recorder)
        return
    if op == "router_gate":
        weights = [_leaf(experts, WIDTH) for _ in range(NUM)]
        steps = [lambda x, w=w: moe_utils.router_gating_linear(x, w, None, torch.float32) for w in weights]
        sources = [_leaf(tokens, 1, WIDTH) for _ in range(NUM)]
        time_chain(op, Chain(steps, sources, weights, separate=True, sizes=sizes), recorder)
        return
    with torch.no_grad():
        _, chosen = moe_utils.topk_routing_with_score_function(logits[0].detach(), top_k)
    probs = [torch.rand(tokens, experts, device="cuda").requires_grad_(True) for _ in range(NUM)]
    sources = [_leaf(tokens, WIDTH) for _ in range(NUM)]
    permute = partial(moe_utils.permute, num_out_tokens=tokens * top_k, fused=True)
    if op == "permute":
        steps = [lambda x, p=p: permute(x, chosen, probs=p)[0] for p in probs]
        time_chain(op, Chain(steps, sources, probs, separate=True, sizes=sizes), recorder)
    elif op == "unpermute":
        with torch.no_grad():
            rows, _, order = permute(sources[0], chosen, probs=probs[0])
        sources = [_leaf(*rows.shape) for _ in range(NUM)]
        step = lambda x: moe_utils.unpermute(x, order, torch.Size((tokens, WIDTH)), fused=True)  # noqa: E731
        time_chain(op, Chain([step] * NUM, sources, separate=True, sizes=sizes), recorder)
    elif op == "sort_chunks":
        counts = torch.full((experts,), tokens // experts, device="cuda", dtype=torch.int64)
        order = torch.randperm(experts, device="cuda")
        weights = [torch.rand(tokens, device="cuda").requires_grad_(True) for _ in range(NUM)]
        steps = [
            lambda x, w=w: moe_utils.sort_chunks_by_idxs(x, counts, order, probs=w, fused=True)[0] for w in weights
        ]
        time_chain(op, Chain(steps, sources, weights, separate=True, sizes=sizes), recorder)
    else:
        raise ValueError(op)


def padding(recorder: Recorder, experts: int) -> None:
    """Rows of experts filled up for fp8 products, and cut back."""
    from transformer_engine.pytorch import Fp8Padding, Fp8Unpadding

    splits = [20] * experts
    pad, cut = Fp8Padding(experts), Fp8Unpadding(experts)
    chain = Chain(
        [lambda x: cut(pad(x, splits)[0], splits)] * NUM, [_leaf(sum(splits), WIDTH)], sizes={"experts": experts}
    )
    time_chain("fp8_padding", chain, recorder)


def hooks(recorder: Recorder, *, wrapped: bool) -> None:
    """Linears as a model within Megatron's data parallelism, whose hook of each parameter runs, or bare."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = config_of()
    layers = [_column(config) for _ in range(NUM)]
    if wrapped:
        model = torch.nn.ModuleList(layers)
        model.config = config
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        data_parallel = DistributedDataParallel(config, options, model)
        parameters, before = list(model.parameters()), data_parallel.zero_grad_buffer
    else:
        parameters, before = main_grads(layers), lambda: None
    steps = [lambda x, layer=layer: layer(x)[0] for layer in layers]
    chain = Chain(steps, [_leaf(TOKENS, 1, WIDTH)], parameters, before=before)
    time_chain("linear_ddp" if wrapped else "linear_bare", chain, recorder)


def adam(recorder: Recorder, tensors: int) -> None:
    """Transformer Engine's fused Adam over fp32 shards, as the distributed optimizer calls it; forward is its step."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    parameters = [torch.ones(WIDTH, device="cuda", requires_grad=True) for _ in range(tensors)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = FusedAdam(parameters, lr=1e-4, weight_decay=0.1, adam_w_mode=True)
    _calls(recorder, "fused_adam", optimizer.step, {"tensors": tensors})


def contexts(recorder: Recorder, recipe: str) -> None:
    """Entering and leaving the context of fp8."""
    _, around = _autocast(recipe)

    def call() -> None:
        with around():
            pass

    _calls(recorder, "fp8_context", call, {}, recipe)


def _calls(recorder: Recorder, op: str, call: Callable[[], Any], sizes: dict[str, Any], dtype: str = "bf16") -> None:
    beside, times, quiet = host_pace.EngineLayer(), [], []
    for _ in range(14):
        settled = recorder.cores.settle()
        scale, _ = recorder.pace.over(beside.seconds(5))
        began = time.perf_counter()
        call()
        times.append(scale * (time.perf_counter() - began))
        torch.cuda.synchronize()
        quiet.append(settled and recorder.cores.still_quiet())
    recorder.cores.release()
    shape = {"ops": 1, **sizes}
    sample = recorder.row(op, "fwd", dtype, shape, [times[i] for i in that_count(times, quiet, 4)])
    recorder.pace_rows(op, dtype, shape)
    recorder.later.append((f"{label_of(op, dtype, shape)}|fwd", call))
    if recorder.writes:
        print(f"{label_of(op, dtype, shape):58s} {sample.median_s * 1e6:8.1f} us", flush=True)


LINEARS = {"column_linear": _column, "row_linear": _row, "norm_linear": _norm_linear,
           "duplicated_linear": _duplicated}  # fmt: skip


def alone(recorder: Recorder) -> Todo:
    """Cases of one GPU."""
    cases = [*_dense_cases(), *_expert_cases(), *_fp8_cases()]
    cases += [_case("ddp", hooks, wrapped=wrapped) for wrapped in (False, True)]
    cases += [_case("fused_adam", adam, tensors) for tensors in (10, 50, 200, 600)]
    return [(name, partial(call, recorder, *args, **named)) for name, call, args, named in cases]


def _case(name: str, call: Callable[..., None], *args: Any, **named: Any) -> Timing:
    return name, call, args, named


def _dense_cases() -> list[Timing]:
    """What a layer without experts calls, in bf16."""
    return [
        *(_case(op, functions, op) for op in ("silu", "torch_linear")),
        *(_case(op, linears, op, make, "bf16", first=True, fused=True) for op, make in LINEARS.items()),
        _case("column_linear", linears, "column_linear", _column, "bf16", first=True, fused=False),
        _case("norm", linears, "norm", _norm, "bf16", first=True, fused=True),
        *(_case("attention", attention, groups) for groups in (2, 4)),
        *(_case(op, functions, op) for op in ("rope", "bias_dropout_add", "swiglu", "weighted_swiglu", "checkpoint")),
    ]


def _expert_cases() -> list[Timing]:
    """Experts' products, choices of kernels for new numbers of rows, and what takes tokens to experts and back."""
    routed = ("router_gate", "router_topk", "router_topk_fused", "router_scores_fused", "permute", "unpermute",
              "sort_chunks")  # fmt: skip
    return [
        *(_case("grouped", grouped, experts, "bf16", first=True, fused=True) for experts in EXPERTS),
        *(_case("grouped", grouped, experts, "bf16", first=True, fused=False) for experts in (8, 64)),
        *(  # current scaling's products are those of delayed scaling
            _case("new_rows", new_rows, experts, recipe)
            for recipe in ("bf16", "fp8-delayed", "fp8-blockwise")
            for experts in (8, 32)
        ),
        *(_case("new_rows", new_rows, 8, recipe, 2048) for recipe in ("bf16", "fp8-tensorwise")),
        *(_case("some_new_rows", new_rows, 32, "bf16", 1024, fresh) for fresh in (4, 8, 16)),
        *(_case(op, routing, op, experts) for op in routed for experts in (8, 64)),
    ]


def _fp8_cases() -> list[Timing]:
    """Contexts, linears, experts and padding of fp8, each recipe in a first micro-batch and in a later one."""
    cases: list[Timing] = []
    for recipe in RECIPES:
        cases.append(_case("fp8_context", contexts, recipe))
        for op in ("column_linear", "norm_linear"):
            for first in (True, False):
                cases.append(_case(f"fp8_{op}", linears, op, LINEARS[op], recipe, first=first, fused=True))
        for experts in (8, 64):
            for first in (True, False):
                cases.append(_case("fp8_grouped", grouped, experts, recipe, first=first, fused=True))
    return cases + [_case("fp8_padding", padding, experts) for experts in (8, 64)]


def _tensor_parallel(recorder: Recorder, op: str, make: Callable[[Any], Any]) -> None:
    """Pairs of a column-parallel and a row-parallel linear under TP 2 with sequence parallelism."""
    start(2, {"tensor_model_parallel_size": 2})
    config = config_of(tensor_model_parallel_size=2, sequence_parallel=True)
    layers = [(make(config), _row(config)) for _ in range(NUM)]
    steps = [lambda x, a=a, b=b: b(a(x)[0])[0] for a, b in layers]
    parameters = main_grads([layer for pair in layers for layer in pair])
    time_chain(op, Chain(steps, [_leaf(TOKENS // 2, 1, WIDTH)], parameters), recorder)


def pairs(recorder: Recorder) -> Todo:
    """Cases of two GPUs."""
    return [
        ("tp2_column_row", partial(_tensor_parallel, recorder, "tp2_column_row", _column)),
        ("tp2_norm_column_row", partial(_tensor_parallel, recorder, "tp2_norm_column_row", _norm_linear)),
    ]
