"""Experts of Transformer Engine as Megatron-Core calls them: grouped linears, routers, permutations and padding."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import torch

from mofa import host_pace
from mofa.calibrate.bench.te_megatron import (
    NUM,
    WIDTH,
    Timing,
    case_with_timing_call,
    config_and_fp8_context,
    first_micro_batch_setter,
    params_with_main_grads,
    random_leaf_tensor,
)
from mofa.calibrate.bench.te_timing import LayerChain, RowRecorder, case_label, quiet_sample_indices, time_layer_chain

EXPERTS = (1, 2, 4, 8, 16, 32, 64, 128)
PADDED_ROWS = 16
"""Multiple that experts' rows are padded to in fp8 (megatron/core/fp8_utils.py, ``get_fp8_align_size``). [rows]"""


def _grouped(config: Any, experts: int, width: int = WIDTH, out: int = WIDTH) -> Any:
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    return TEGroupedLinear(
        experts, width, out, parallel_mode="column", config=config, init_method=config.init_method, bias=False,
        skip_bias_add=False, is_expert=True, tp_comm_buffer_name="fc1",
    ).cuda()  # fmt: skip


def time_grouped_linears(recorder: RowRecorder, experts: int, recipe: str, *, first: bool, fused: bool) -> None:
    """A chain of grouped linears."""
    config, around = config_and_fp8_context(recipe)
    config.gradient_accumulation_fusion = fused
    num = max(2, min(NUM, 256 // experts))
    layers = [_grouped(config, experts) for _ in range(num)]
    splits = [16 if recipe == "bf16" else 128] * experts
    steps = [lambda x, layer=layer: layer(x, splits)[0] for layer in layers]
    sizes = {"experts": experts, "first": int(first), "fused": int(fused)}
    chain = LayerChain(
        steps, [random_leaf_tensor(sum(splits), WIDTH)], params_with_main_grads(layers, fused=fused), around,
        before=first_micro_batch_setter(layers, first), sizes=sizes, dtype=recipe,
    )  # fmt: skip
    time_layer_chain("grouped_linear", chain, recorder)


def time_new_row_counts(
    recorder: RowRecorder, experts: int, recipe: str = "bf16", width: int = 1024, fresh: int = 0
) -> None:
    """A grouped linear whose experts get numbers of tokens that none had before, and then the same once more.

    Numbers lie around one mean in pairs, so that all rounds take the same bytes; in fp8 they are padded as Megatron
    does. Where only ``fresh`` experts get new ones, these lie among others whose numbers stay. The output's width is
    the case's own, and not the input's: no product of another case or way has its shape.
    """
    config, around = config_and_fp8_context(recipe)
    layer = _grouped(config, experts, width, width + 16 * (100 * bool(fresh) + experts + fresh))
    parameters = params_with_main_grads([layer])
    num_repetitions, dropped = (24, 4) if recipe == "bf16" else (16, 6)
    multiple = 1 if recipe == "bf16" else PADDED_ROWS
    each = (fresh or experts) // 2
    row_counts = [multiple * (i + 1) for i in range(num_repetitions * each)]
    random.Random(experts).shuffle(row_counts)
    tokens = 1024 + multiple * len(row_counts)
    source = random_leaf_tensor(experts * tokens, width)
    beside, names = host_pace.TransformerEngineLayer(), ("grouped_new_rows", "grouped_seen_rows")
    times: dict[str, tuple[list[float], list[float], list[bool]]] = {name: ([], [], []) for name in names}
    for turn in range(num_repetitions):
        moved = row_counts[turn * each : (turn + 1) * each]
        splits, new = [tokens] * experts, [tokens + sign * n for n in moved for sign in (1, -1)]
        splits[:: experts // len(new)] = new
        for name in times:
            for x in (source, *parameters):
                x.grad = None
            first_micro_batch_setter([layer], True)()
            settled = recorder.cores.stay_or_move_to_quiet()
            ahead_scale, behind_scale = recorder.pace.layer_times_over_given(beside.forward_and_backward_s(5))
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
            times[name][2].append(settled and recorder.cores.is_still_quiet())
    recorder.cores.release()
    sizes = {"ops": 1, "experts": experts, "width": width} | ({"fresh": fresh} if fresh else {})
    for name, (forward, backward, quiet) in times.items():
        ahead = recorder.write_row(
            name, "fwd", recipe, sizes, [forward[i] for i in quiet_sample_indices(forward, quiet, dropped)]
        )
        behind = recorder.write_row(
            name, "bwd", recipe, sizes, [backward[i] for i in quiet_sample_indices(backward, quiet, dropped)]
        )
        recorder.write_pace_rows(name, recipe, sizes)
        if recorder.writes:
            label = case_label(name, recipe, sizes)
            print(f"{label:58s} {ahead.median_s * 1e6:8.1f} {behind.median_s * 1e6:8.1f} us", flush=True)


def time_routing(recorder: RowRecorder, op: str, experts: int, top_k: int = 2) -> None:
    """Router, permutation and sorting of tokens."""
    from megatron.core.transformer.moe import moe_utils

    tokens = 512
    logits = [random_leaf_tensor(tokens, experts, dtype=torch.float32) for _ in range(NUM)]
    sizes = {"experts": experts}
    if op in ("router_topk", "router_topk_fused"):
        fused = op.endswith("fused")
        step = lambda x: moe_utils.topk_routing_with_score_function(x, top_k, fused=fused)[0]  # noqa: E731
        time_layer_chain(op, LayerChain([step] * NUM, logits, separate=True, sizes=sizes), recorder)
        return
    if op == "router_scores_fused":
        step = lambda x: moe_utils.compute_routing_scores_for_aux_loss(x, top_k, "softmax", fused=True)[1]  # noqa: E731
        time_layer_chain(op, LayerChain([step] * NUM, logits, separate=True, sizes=sizes), recorder)
        return
    if op == "router_gate":
        weights = [random_leaf_tensor(experts, WIDTH) for _ in range(NUM)]
        steps = [lambda x, w=w: moe_utils.router_gating_linear(x, w, None, torch.float32) for w in weights]
        sources = [random_leaf_tensor(tokens, 1, WIDTH) for _ in range(NUM)]
        time_layer_chain(op, LayerChain(steps, sources, weights, separate=True, sizes=sizes), recorder)
        return
    with torch.no_grad():
        _, chosen = moe_utils.topk_routing_with_score_function(logits[0].detach(), top_k)
    probs = [torch.rand(tokens, experts, device="cuda").requires_grad_(True) for _ in range(NUM)]
    sources = [random_leaf_tensor(tokens, WIDTH) for _ in range(NUM)]
    permute = partial(moe_utils.permute, num_out_tokens=tokens * top_k, fused=True)
    if op == "permute":
        steps = [lambda x, p=p: permute(x, chosen, probs=p)[0] for p in probs]
        time_layer_chain(op, LayerChain(steps, sources, probs, separate=True, sizes=sizes), recorder)
    elif op == "unpermute":
        with torch.no_grad():
            rows, _, order = permute(sources[0], chosen, probs=probs[0])
        sources = [random_leaf_tensor(*rows.shape) for _ in range(NUM)]
        step = lambda x: moe_utils.unpermute(x, order, torch.Size((tokens, WIDTH)), fused=True)  # noqa: E731
        time_layer_chain(op, LayerChain([step] * NUM, sources, separate=True, sizes=sizes), recorder)
    elif op == "sort_chunks":
        counts = torch.full((experts,), tokens // experts, device="cuda", dtype=torch.int64)
        order = torch.randperm(experts, device="cuda")
        weights = [torch.rand(tokens, device="cuda").requires_grad_(True) for _ in range(NUM)]
        steps = [
            lambda x, w=w: moe_utils.sort_chunks_by_idxs(x, counts, order, probs=w, fused=True)[0] for w in weights
        ]
        time_layer_chain(op, LayerChain(steps, sources, weights, separate=True, sizes=sizes), recorder)
    else:
        raise ValueError(op)


def time_fp8_row_padding(recorder: RowRecorder, experts: int) -> None:
    """Rows of experts filled up for fp8 products, and cut back."""
    from transformer_engine.pytorch import Fp8Padding, Fp8Unpadding

    splits = [20] * experts
    pad, cut = Fp8Padding(experts), Fp8Unpadding(experts)
    chain = LayerChain(
        [lambda x: cut(pad(x, splits)[0], splits)] * NUM,
        [random_leaf_tensor(sum(splits), WIDTH)],
        sizes={"experts": experts},
    )
    time_layer_chain("fp8_padding", chain, recorder)


def bf16_expert_timings() -> list[Timing]:
    """Experts' products, choices of kernels for new numbers of rows, and what takes tokens to experts and back."""
    routed = ("router_gate", "router_topk", "router_topk_fused", "router_scores_fused", "permute", "unpermute",
              "sort_chunks")  # fmt: skip
    return [
        *(
            case_with_timing_call("grouped", time_grouped_linears, experts, "bf16", first=True, fused=True)
            for experts in EXPERTS
        ),
        *(
            case_with_timing_call("grouped", time_grouped_linears, experts, "bf16", first=True, fused=False)
            for experts in (8, 64)
        ),
        *(  # current scaling's products are those of delayed scaling
            case_with_timing_call("new_rows", time_new_row_counts, experts, recipe)
            for recipe in ("bf16", "fp8-delayed", "fp8-blockwise")
            for experts in (8, 32)
        ),
        *(
            case_with_timing_call("new_rows", time_new_row_counts, 8, recipe, 2048)
            for recipe in ("bf16", "fp8-tensorwise")
        ),
        *(case_with_timing_call("some_new_rows", time_new_row_counts, 32, "bf16", 1024, fresh) for fresh in (4, 8, 16)),
        *(case_with_timing_call(op, time_routing, op, experts) for op in routed for experts in (8, 64)),
    ]


def fp8_expert_timings(recipe: str) -> list[Timing]:
    """Grouped linears of a recipe of fp8, in a step's first micro-batch and in a later one."""
    return [
        case_with_timing_call("fp8_grouped", time_grouped_linears, experts, recipe, first=first, fused=True)
        for experts in (8, 64)
        for first in (True, False)
    ]


def fp8_padding_timings() -> list[Timing]:
    """Rows filled up for fp8 products."""
    return [case_with_timing_call("fp8_padding", time_fp8_row_padding, experts) for experts in (8, 64)]
