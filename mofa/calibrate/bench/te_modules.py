"""Chains of Transformer Engine's modules as Megatron-Core calls them, for :mod:`mofa.calibrate.bench.te_host`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from mofa import host_pace
from mofa.calibrate.bench import te_experts
from mofa.calibrate.bench.te_megatron import (
    HEADS,
    NUM,
    RECIPES,
    TOKENS,
    WIDTH,
    Timing,
    Todo,
    case_with_timing_call,
    config_and_fp8_context,
    first_micro_batch_setter,
    init_process_groups,
    params_with_main_grads,
    random_leaf_tensor,
    small_layer_config,
)  # fmt: skip
from mofa.calibrate.bench.te_timing import LayerChain, RowRecorder, case_label, quiet_sample_indices, time_layer_chain


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


def time_linears(
    recorder: RowRecorder, op: str, make: Callable[[Any], Any], recipe: str, *, first: bool, fused: bool
) -> None:
    """A chain of linears or norms of one kind."""
    config, around = config_and_fp8_context(recipe)
    config.gradient_accumulation_fusion = fused
    layers = [make(config) for _ in range(NUM)]
    plain = make is _norm
    steps = layers if plain else [lambda x, layer=layer: layer(x)[0] for layer in layers]
    sizes = {"first": int(first), "fused": int(fused)}
    chain = LayerChain(
        steps, [random_leaf_tensor(TOKENS, 1, WIDTH)], params_with_main_grads(layers, fused=fused), around,
        before=None if plain else first_micro_batch_setter(layers, first), sizes=sizes, dtype=recipe,
    )  # fmt: skip
    time_layer_chain(op, chain, recorder)


def time_attention(recorder: RowRecorder, groups: int) -> None:
    """A chain of core attentions, whose keys and values are constant."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = small_layer_config(num_query_groups=groups)
    layer = TEDotProductAttention(config, 1, AttnMaskType.causal, "self")
    k, v = (torch.randn(TOKENS, 1, groups, WIDTH // HEADS, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step(x: Any) -> Any:
        q = x.view(TOKENS, 1, HEADS, WIDTH // HEADS)
        return layer(q, k, v, None, attn_mask_type=AttnMaskType.causal)

    time_layer_chain(
        "attention",
        LayerChain([step] * NUM, [random_leaf_tensor(TOKENS, 1, WIDTH)], sizes={"groups": groups}),
        recorder,
    )


def time_fused_functions(recorder: RowRecorder, op: str) -> None:
    """Fused functions: rotary embedding, SwiGLU, bias-dropout-add, checkpoints."""
    from megatron.core import tensor_parallel
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl

    x = random_leaf_tensor(TOKENS, 1, WIDTH)
    if op == "rope":
        freqs = torch.randn(TOKENS, 1, 1, WIDTH // HEADS, device="cuda")
        step = lambda t: fused_apply_rotary_pos_emb(t, freqs)  # noqa: E731
        chain = LayerChain([step] * NUM, [random_leaf_tensor(TOKENS, 1, HEADS, WIDTH // HEADS)])
    elif op == "bias_dropout_add":
        other = torch.ones_like(x)
        chain = LayerChain([lambda t: bias_dropout_add_fused_train((t, None), other, 0.0)] * NUM, [x])
    elif op == "swiglu":
        sources = [random_leaf_tensor(TOKENS, 1, 2 * WIDTH) for _ in range(NUM)]
        chain = LayerChain([lambda t: bias_swiglu_impl(t, None)] * NUM, sources, separate=True)
    elif op == "weighted_swiglu":
        sources = [random_leaf_tensor(TOKENS, 2 * WIDTH) for _ in range(NUM)]
        weights = [random_leaf_tensor(TOKENS, 1, dtype=torch.float32) for _ in range(NUM)]
        steps = [lambda t, w=w: weighted_bias_swiglu_impl(t, None, w) for w in weights]
        chain = LayerChain(steps, sources, weights, separate=True)
    elif op == "checkpoint":
        chain = LayerChain([lambda t: tensor_parallel.checkpoint(F.silu, False, t)] * NUM, [x])
    elif op == "silu":
        chain = LayerChain([F.silu] * NUM, [x])
    elif op == "torch_linear":
        weights = [random_leaf_tensor(WIDTH, WIDTH) for _ in range(NUM)]
        chain = LayerChain([lambda t, w=w: F.linear(t, w) for w in weights], [x], weights)
    else:
        raise ValueError(op)
    time_layer_chain(op, chain, recorder)


def time_gradient_hooks(recorder: RowRecorder, *, wrapped: bool) -> None:
    """Linears as a model within Megatron's data parallelism, whose hook of each parameter runs, or bare."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = small_layer_config()
    layers = [_column(config) for _ in range(NUM)]
    if wrapped:
        model = torch.nn.ModuleList(layers)
        model.config = config
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        data_parallel = DistributedDataParallel(config, options, model)
        parameters, before = list(model.parameters()), data_parallel.zero_grad_buffer
    else:
        parameters, before = params_with_main_grads(layers), lambda: None
    steps = [lambda x, layer=layer: layer(x)[0] for layer in layers]
    chain = LayerChain(steps, [random_leaf_tensor(TOKENS, 1, WIDTH)], parameters, before=before)
    time_layer_chain("linear_ddp" if wrapped else "linear_bare", chain, recorder)


def time_adam(recorder: RowRecorder, tensors: int) -> None:
    """Transformer Engine's fused Adam over fp32 shards, as the distributed optimizer calls it; forward is its step."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    parameters = [torch.ones(WIDTH, device="cuda", requires_grad=True) for _ in range(tensors)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = FusedAdam(parameters, lr=1e-4, weight_decay=0.1, adam_w_mode=True)
    _calls(recorder, "fused_adam", optimizer.step, {"tensors": tensors})


def time_fp8_contexts(recorder: RowRecorder, recipe: str) -> None:
    """Entering and leaving the context of fp8."""
    _, around = config_and_fp8_context(recipe)

    def call() -> None:
        with around():
            pass

    _calls(recorder, "fp8_context", call, {}, recipe)


def _calls(recorder: RowRecorder, op: str, call: Callable[[], Any], sizes: dict[str, Any], dtype: str = "bf16") -> None:
    beside, times, quiet = host_pace.TransformerEngineLayer(), [], []
    for _ in range(14):
        settled = recorder.cores.stay_or_move_to_quiet()
        scale, _ = recorder.pace.layer_times_over_given(beside.forward_and_backward_s(5))
        began = time.perf_counter()
        call()
        times.append(scale * (time.perf_counter() - began))
        torch.cuda.synchronize()
        quiet.append(settled and recorder.cores.is_still_quiet())
    recorder.cores.release()
    shape = {"ops": 1, **sizes}
    sample = recorder.write_row(op, "fwd", dtype, shape, [times[i] for i in quiet_sample_indices(times, quiet, 4)])
    recorder.write_pace_rows(op, dtype, shape)
    recorder.later.append((f"{case_label(op, dtype, shape)}|fwd", call))
    if recorder.writes:
        print(f"{case_label(op, dtype, shape):58s} {sample.median_s * 1e6:8.1f} us", flush=True)


LINEARS = {"column_linear": _column, "row_linear": _row, "norm_linear": _norm_linear,
           "duplicated_linear": _duplicated}  # fmt: skip


def one_gpu_module_cases(recorder: RowRecorder) -> Todo:
    """Cases of Transformer Engine's modules that need one GPU."""
    cases = [*_dense_cases(), *te_experts.bf16_expert_timings(), *_fp8_cases()]
    cases += [case_with_timing_call("ddp", time_gradient_hooks, wrapped=wrapped) for wrapped in (False, True)]
    cases += [case_with_timing_call("fused_adam", time_adam, tensors) for tensors in (10, 50, 200, 600)]
    return [(name, partial(call, recorder, *args, **named)) for name, call, args, named in cases]


def _dense_cases() -> list[Timing]:
    """What a layer without experts calls, in bf16."""
    return [
        *(case_with_timing_call(op, time_fused_functions, op) for op in ("silu", "torch_linear")),
        *(
            case_with_timing_call(op, time_linears, op, make, "bf16", first=True, fused=True)
            for op, make in LINEARS.items()
        ),
        case_with_timing_call("column_linear", time_linears, "column_linear", _column, "bf16", first=True, fused=False),
        case_with_timing_call("norm", time_linears, "norm", _norm, "bf16", first=True, fused=True),
        *(case_with_timing_call("attention", time_attention, groups) for groups in (2, 4)),
        *(
            case_with_timing_call(op, time_fused_functions, op)
            for op in ("rope", "bias_dropout_add", "swiglu", "weighted_swiglu", "checkpoint")
        ),
    ]


def _fp8_cases() -> list[Timing]:
    """Contexts, linears, experts and padding of fp8, each recipe in a first micro-batch and in a later one."""
    cases: list[Timing] = []
    for recipe in RECIPES:
        cases.append(case_with_timing_call("fp8_context", time_fp8_contexts, recipe))
        for op in ("column_linear", "norm_linear"):
            for first in (True, False):
                cases.append(
                    case_with_timing_call(f"fp8_{op}", time_linears, op, LINEARS[op], recipe, first=first, fused=True)
                )
        cases += te_experts.fp8_expert_timings(recipe)
    return cases + te_experts.fp8_padding_timings()


def _tensor_parallel(recorder: RowRecorder, op: str, make: Callable[[Any], Any]) -> None:
    """Pairs of a column-parallel and a row-parallel linear under TP 2 with sequence parallelism."""
    init_process_groups(2, {"tensor_model_parallel_size": 2})
    config = small_layer_config(tensor_model_parallel_size=2, sequence_parallel=True)
    layers = [(make(config), _row(config)) for _ in range(NUM)]
    steps = [lambda x, a=a, b=b: b(a(x)[0])[0] for a, b in layers]
    parameters = params_with_main_grads([layer for pair in layers for layer in pair])
    time_layer_chain(op, LayerChain(steps, [random_leaf_tensor(TOKENS // 2, 1, WIDTH)], parameters), recorder)


def two_gpu_module_cases(recorder: RowRecorder) -> Todo:
    """Cases of Transformer Engine's modules that need two GPUs."""
    return [
        ("tp2_column_row", partial(_tensor_parallel, recorder, "tp2_column_row", _column)),
        ("tp2_norm_column_row", partial(_tensor_parallel, recorder, "tp2_norm_column_row", _norm_linear)),
    ]
