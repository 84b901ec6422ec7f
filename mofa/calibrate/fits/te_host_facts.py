"""Facts of a host's modules from rows of :mod:`mofa.calibrate.bench.te_host`.

Every time is taken over a small layer of Transformer Engine that was timed beside it, each way over its own, so that
rows of several machines can be joined, and given for a host on which that layer takes a chosen time. Small ops say
less: on two machines on which they took as long, modules' ways back took 0.9 to 2 times as long.

In a chain of its own a module's code and data stay in the processor's caches; in a layer they have left them when it is
called again. Forward, a layer's modules are timed one by one where they are called; what is timed in chains alone is
taken as much longer as those are (:func:`forward_time_in_layer_over_chain`), and so is the way back
(:func:`backward_time_in_layer_over_chain`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import numpy as np

from mofa.calibrate.fits.te_relative_host_times import (
    ATTENTION,
    BF16,
    DENSE,
    FAMILY,
    PACES,
    QUERIES,
    HostTimesOverSmallLayer,
    linear_shape_text,
)
from mofa.calibrate.measurements import Row
from mofa.specs.host import SmallLayerTime

MOE, MOE_EXPERTS = "model_moe8", 8
FUSED_ROUTER = "model_moe8_router_fused"
"""The same with one kernel that chooses experts."""
ONE_GPU_EXPERTS = {MOE: MOE_EXPERTS, "model_moe64": 64, "model_moe128": 128}
"""Models by the experts of each layer."""
EXCHANGED_EXPERTS = {"model_ep2_moe8": 4, "model_ep2_moe64": 32}
"""The same over two ranks, by the experts on each."""
OF_EXPERTS = {**ONE_GPU_EXPERTS, **EXCHANGED_EXPERTS}
CALLED = {
    "linear": ("column_linear", DENSE, "TELinear.forward"),
    "norm_linear": ("norm_linear", DENSE, "TELayerNormColumnParallelLinear.forward"),
    "attention": ("attention", DENSE, ATTENTION),
    "rope": ("rope", DENSE, "fused_apply_rotary_pos_emb"),
    "bias_dropout_add": ("bias_dropout_add", DENSE, "bias_dropout_add_fused_train"),
    "swiglu": ("swiglu", DENSE, "bias_swiglu_impl"),
    "norm": ("norm", MOE, "RMSNorm.forward"),
    "weighted_swiglu": ("weighted_swiglu", MOE, "weighted_bias_swiglu_impl"),
    "permute": ("permute", MOE, "permute"),
    "unpermute": ("unpermute", MOE, "unpermute"),
    "sort_chunks": ("sort_chunks", MOE, "sort_chunks_by_idxs"),
}  # fmt: skip
"""Modules by the chain in which they are timed, and the model and the method or function that its layers call."""
IN_FP8 = ("linear", "norm_linear")
"""Modules that compute in fp8, which layers of a dense model have. Grouped linears do too."""
SPLIT_NODES = 5.0
"""Plain nodes of autograd's between a linear and attention: the split, views and the reshape of queries. [-]"""
FP8 = ("fp8-blockwise", "fp8-delayed", "fp8-tensorwise")
QK_NORM = "model_qk_norm"
"""A model with norms over heads."""
LATENT = "model_latent"
LATENT_LAYER = {
    "norm": 1.0, "linear": 4.0, "norm_linear": 3.0, "rope": 2.0, "attention": 1.0, "swiglu": 1.0,
    "bias_dropout_add": 2.0, "layer": 1.0,
}  # fmt: skip
"""A dense layer with latent attention, but for that one's own Python."""
DENSE_LAYER = {"norm_linear": 2.0, "linear": 2.0, "rope": 2.0, "attention": 1.0, "swiglu": 1.0, "bias_dropout_add": 2.0}


RelativeSeconds = dict[str, float]
"""Layers by the names of :class:`mofa.specs.host.ModuleCallTime`'s fields. [-]"""


def forward_time_in_layer_over_chain(times: HostTimesOverSmallLayer, dtype: str = BF16) -> float:
    """How much longer a module takes in a layer than in a chain of its own, forward; 1 where that was not timed. [-]"""
    ratios = []
    for chain, model, method in CALLED.values():
        alone, called = (
            times.median_time_of_op(chain, "fwd", dtype, **_chosen(chain, dtype)),
            times.method_call_time(model, method, dtype),
        )
        if alone is not None and called is not None:
            ratios.append(called / alone)
    return median(ratios) if ratios else 1.0


def backward_time_in_layer_over_chain(times: HostTimesOverSmallLayer) -> float:
    """A dense layer's backward on autograd's thread, over the backwards of chains of its modules. [-]"""
    layer, plain = times.time_per_added_layer(DENSE, "backward"), times.median_time_of_op("silu", "bwd")
    chains = {CALLED[name][0]: number for name, number in DENSE_LAYER.items()}
    alone = [
        (number, times.median_time_of_op(chain, "bwd", BF16, **_chosen(chain))) for chain, number in chains.items()
    ]
    known = [count * seconds for count, seconds in alone if seconds is not None]
    if layer is None or plain is None or len(known) < len(alone):
        return 1.0
    return layer / (sum(known) + SPLIT_NODES * plain)


def _chosen(chain: str, dtype: str = BF16) -> dict[str, int]:
    """Which of a chain's rows count: weights' gradients are added by the product, and fp8 weights were cast before."""
    if chain not in ("column_linear", "norm_linear", "grouped_linear"):
        return {}
    return {"fused": 1} if dtype == BF16 else {"fused": 1, "first": 0}


def _first(times: HostTimesOverSmallLayer, chain: str, dtype: str, **sizes: int) -> float | None:
    """A chain in a step's first micro-batch, forward, in which fp8 weights are cast."""
    return times.median_time_of_op(chain, "fwd", dtype, fused=1, first=1, **sizes)


def module_times_over_small_layer(times: HostTimesOverSmallLayer) -> dict[str, RelativeSeconds]:
    """What every timed module takes, in layers of :class:`mofa.host_pace.TransformerEngineLayer`, each way. [-]

    Examples
    --------
    >>> timed = {("rope", "fwd", "bf16"): [({"ops": 16}, 8.0)], ("rope", "bwd", "bf16"): [({}, 6.0)]}
    >>> module_times_over_small_layer(HostTimesOverSmallLayer(timed))
    {'rope': {'forward_s': 8.0, 'backward_s': 6.0}}
    """
    back = backward_time_in_layer_over_chain(times)
    modules: dict[str, RelativeSeconds] = {}
    if ways := _grouped(times, forward_time_in_layer_over_chain(times), back):
        modules["grouped_linear"] = ways
    for dtype in (BF16, *FP8):
        end, ahead = "" if dtype == BF16 else f" {dtype}", forward_time_in_layer_over_chain(times, dtype)
        for name, (chain, model, method) in CALLED.items():
            if dtype != BF16 and name not in IN_FP8:
                continue
            alone = times.median_time_of_op(chain, "fwd", dtype, **_chosen(chain, dtype))
            called = times.method_call_time(model, method, dtype) or (None if alone is None else ahead * alone)
            behind = times.median_time_of_op(chain, "bwd", dtype, **_chosen(chain, dtype))
            _put(modules, name + end, called, None if behind is None else back * behind)
            if dtype != BF16 and name + end in modules and (first := _first(times, chain, dtype)) is not None:
                assert alone is not None
                modules[name + end]["forward_cast_s"] = ahead * max(first - alone, 0.0)
        chosen = [_choice(times, dtype, direction) for direction in CHOSEN]
        _put(
            modules,
            "kernel_choice" + end,
            _times(chosen[0], forward_time_in_layer_over_chain(times)),
            _times(chosen[1], back),
        )
        if dtype != BF16:
            _put_forward(modules, "fp8_context" + end, times.median_time_of_op("fp8_context", "fwd", dtype))
    if ways := _over_experts(times, "fp8_padding", BF16, forward_time_in_layer_over_chain(times), back, {}):
        modules["fp8_padding"] = {name: value / PADDED_AND_CUT for name, value in ways.items()}
    _norms(times, modules)
    _dense(times, modules, back)
    _latent(times, modules)
    _experts(times, modules, back)
    for dtype in FP8:
        if ways := _grouped_in(times, dtype, modules.get("grouped_linear", {})):
            modules[f"grouped_linear {dtype}"] = ways
    _parallel(times, modules)
    if "linear" in modules:
        modules["amax"] = {"forward_s": AMAX, "backward_s": AMAX}
    return modules


AMAX = 0.048
"""Reduction of a cast's largest element, which Transformer Engine issues from C++ (Float8CurrentScalingQuantizer in
pytorch/csrc/quantizer.cpp). As the part of any collective from the question whether its stream is captured to the event
behind its kernel: 67 us on the quiet thread of te4-tp4-llama8b-16l-traced (fitting half), where a layer takes 1.41 ms.
[-]"""
TENSOR_PARALLEL, COLLECTIVES = "model_tp2_dense", (4.0, 6.0)
"""A dense layer under tensor and sequence parallelism, and the collectives that its linears launch each way: inputs are
gathered once more for weights' gradients. [-]"""
RING, GATHERED, EXCHANGED = CONTEXT_PARALLEL = ("model_cp2_p2p", "model_cp2_all_gather", "model_cp2_a2a")
STEPS = 2.0


def _parallel(times: HostTimesOverSmallLayer, modules: dict[str, RelativeSeconds]) -> None:
    """What a layer takes longer over two ranks: by each collective of a linear's, and attention with all of its own.

    Forward by the kind of context parallelism: of a ring by each of two steps. Back they are not told apart, as ways
    back of one kind differ by as much.
    """

    def more(part: str, number: float) -> float | None:
        alone, layer = (
            times.time_per_layer_with_dense_ends(DENSE, part),
            times.time_per_layer_with_dense_ends(TENSOR_PARALLEL, part),
        )
        return None if alone is None or layer is None else max(layer - alone, 0.0) / number

    _put(modules, "collective", *(more(part, n) for part, n in zip(("forward", "backward"), COLLECTIVES, strict=True)))
    alone = times.method_call_time(DENSE, ATTENTION)
    dense = times.time_per_layer_with_dense_ends(DENSE, "backward")
    layers = [
        layer
        for model in CONTEXT_PARALLEL
        if (layer := times.time_per_layer_with_dense_ends(model, "backward")) is not None
    ]
    if alone is None or dense is None or not layers or "attention" not in modules:
        return
    behind = max(median(layers) - dense, 0.0)
    ahead = {
        model: max(called - alone, 0.0)
        for model in CONTEXT_PARALLEL
        if (called := times.method_call_time(model, ATTENTION))
    }
    if RING in ahead:
        modules["attention"] |= {"forward_each_s": ahead[RING] / STEPS, "backward_each_s": behind / STEPS}
    _put(modules, "gathered_attention", ahead.get(GATHERED), behind)
    _put(modules, "exchanged_attention", ahead.get(EXCHANGED), behind)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _put(modules: dict[str, RelativeSeconds], module: str, forward: float | None, backward: float | None) -> None:
    if forward is not None and backward is not None:
        modules[module] = {"forward_s": max(forward, 0.0), "backward_s": max(backward, 0.0)}


def _put_forward(modules: dict[str, RelativeSeconds], module: str, forward: float | None) -> None:
    """Of a module that autograd knows nothing of."""
    if forward is not None:
        modules[module] = {"forward_s": forward}


def _grouped(times: HostTimesOverSmallLayer, ahead: float, back: float) -> RelativeSeconds:
    """A line over the number of experts: forward where layers call it, else of chains, as much longer as other modules
    are in layers.

    In te1-qwen30b-4l-first-traced (fitting half), whose small op takes 6.9 us, 128 experts' takes 3.6 ms forward under
    the profiler, with which the step is no longer: 0.7 before its first product, 12 us for each, 0.7 behind the last.
    """
    chains = _over_experts(times, "grouped_linear", BF16, ahead, back, {"fused": 1})
    called = {
        n: value
        for model, n in OF_EXPERTS.items()
        if (value := times.method_call_time(model, "TEGroupedLinear.forward"))
    }
    if chains and (line := line_of_least_relative_errors(called)) is not None:
        chains["forward_s"], chains["forward_each_s"] = line
    return chains


def _grouped_in(times: HostTimesOverSmallLayer, dtype: str, plain: Mapping[str, float]) -> RelativeSeconds:
    """The same in fp8: what it takes longer in layers than in chains, such as hooks of parameters, it does as in bf16
    (``plain``), once and for each expert. Casts of weights, in a step's first micro-batch, are kept by themselves."""
    chains, beside = (
        _over_experts(times, "grouped_linear", scaling, 1.0, 1.0, _chosen("grouped_linear", scaling))
        for scaling in (dtype, BF16)
    )
    ways = {name: max(value + plain.get(name, 0.0) - beside.get(name, 0.0), 0.0) for name, value in chains.items()}
    casts = [
        (first - cast_before) / n
        for n in OF_EXPERTS.values()
        if (first := _first(times, "grouped_linear", dtype, experts=n)) is not None
        and (cast_before := times.median_time_of_op("grouped_linear", "fwd", dtype, fused=1, first=0, experts=n))
        is not None
    ]
    return {**ways, "forward_each_cast_s": max(median(casts), 0.0)} if ways and casts else ways


PADDED_AND_CUT = 2.0
"""Calls in each step of the chain that fills up experts' rows and cuts them again. [-]"""


def _over_experts(
    times: HostTimesOverSmallLayer, op: str, dtype: str, ahead: float, back: float, sizes: Mapping[str, int]
) -> RelativeSeconds:
    """A line over the number of experts, each way, ``ahead`` and ``back`` times as long as in chains; none of fewer
    than two numbers."""
    made: RelativeSeconds = {}
    for direction, name, cold in (("fwd", "forward", ahead), ("bwd", "backward", back)):
        numbers = {int(shape["experts"]) for shape, _ in times.times_by_case.get((op, direction, dtype), [])}
        medians = {n: times.median_time_of_op(op, direction, dtype, **sizes, experts=n) for n in numbers}
        values = {n: value for n, value in medians.items() if value is not None}
        line = line_of_least_relative_errors(values)
        if line is None:
            return {}
        made[f"{name}_s"], made[f"{name}_each_s"] = (cold * value for value in line)
    return made


CHOSEN = {"fwd": 1, "bwd": 2}
"""Products of an expert in a grouped linear, each way: back one for each gradient. [-]"""
ONE_SCALE = ("fp8-delayed", "fp8-tensorwise")
"""Recipes whose products are the same to the library, with one scale a tensor: the one that is timed first chooses."""


def _choice(times: HostTimesOverSmallLayer, dtype: str, direction: str) -> float | None:
    """What each product of a grouped linear takes longer, each way, whose number of rows was never there.

    The mean of a linear's experts, in chains. The way back is 0.93 of the way forward in
    te2-ep2-moonlight-9l-skewed-traced (fitting half; a product of a known shape takes 9.0 times as long with a choice
    forward, 9.5 and 7.3 for the gradients). The least of linears counts, as in others kernels are loaded besides.
    """
    by_linear: dict[str, list[float]] = defaultdict(list)
    for scaling in ONE_SCALE if dtype in ONE_SCALE else (dtype,):
        seen = {
            linear_shape_text(shape): value
            for shape, value in times.times_by_case.get(("grouped_seen_rows", direction, scaling), [])
        }
        for shape, value in times.times_by_case.get(("grouped_new_rows", direction, scaling), []):
            if (linear := linear_shape_text(shape)) in seen:
                by_linear[linear].append((value - seen[linear]) / (CHOSEN[direction] * int(shape["experts"])))
    return min(map(max, by_linear.values()), default=None)


def line_of_least_relative_errors(values: Mapping[int, float]) -> tuple[float, float] | None:
    """What is there at 0, and what each adds, of least relative errors."""
    if len(values) < 2:
        return None
    numbers, seconds = np.array(list(values), dtype=float), np.array(list(values.values()))
    columns = np.stack([np.ones_like(numbers), numbers], axis=1) / seconds[:, None]
    once, each = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
    return max(float(once), 0.0), max(float(each), 0.0)


def _sum(known: Mapping[str, RelativeSeconds], direction: str, modules: Mapping[str, float]) -> float | None:
    """What modules take together, each so often."""
    if any(name not in known for name in modules):
        return None
    return sum(count * known[name].get(direction, 0.0) for name, count in modules.items())


def _rest(total: float | None, parts: float | None) -> float | None:
    return None if total is None or parts is None else max(total - parts, 0.0)


def _norms(times: HostTimesOverSmallLayer, modules: dict[str, RelativeSeconds]) -> None:
    """A norm forward where it is timed twice in a layer: over the heads of queries and of keys, which are copied.

    Alone it hits what it just used: in te1-qwen30b-4l-first-traced (fitting half), whose small op takes 6.9 us, both
    add 0.45 ms to what lies between the projection and the rotation.
    """
    made, plain = (times.method_call_time(model, QUERIES) for model in (QK_NORM, DENSE))
    copy = times.median_time_of_op("silu", "fwd")
    if made is not None and plain is not None and copy is not None and "norm" in modules:
        modules["norm"]["forward_s"] = max(made - plain - copy, 0.0) / 2.0


def _latent(times: HostTimesOverSmallLayer, modules: dict[str, RelativeSeconds]) -> None:
    """Latent attention's own Python, each way: what is left of a layer of it that projects queries twice as well."""
    ahead, behind = (
        _rest(times.time_per_layer_with_dense_ends(LATENT, part), _sum(modules, f"{part}_s", LATENT_LAYER))
        for part in ("forward", "backward")
    )
    _put(modules, "latent_attention", ahead, behind)


def _dense(times: HostTimesOverSmallLayer, modules: dict[str, RelativeSeconds], back: float) -> None:
    """Attention's and the layer's own Python: what is left of what calls their modules."""
    plain = times.median_time_of_op("silu", "bwd")
    made = times.method_call_time(DENSE, QUERIES)
    own = _rest(made, _sum(modules, "forward_s", {"norm_linear": 1.0}))
    _put(modules, "self_attention", own, None if plain is None else back * SPLIT_NODES * plain)
    in_modules = _sum(modules, "forward_s", {**DENSE_LAYER, "self_attention": 1.0})
    _put_forward(modules, "layer", _rest(times.time_per_layer_with_dense_ends(DENSE, "forward"), in_modules))
    _ends(times, modules, None if plain is None else back * SPLIT_NODES * plain)


def _ends(
    times: HostTimesOverSmallLayer, modules: dict[str, RelativeSeconds], embedding_backward: float | None
) -> None:
    """What a model's pass takes beside its layers: the head its own call, the embedding all the rest of the forward.

    That rest lies ahead of the first layer: the schedule's step, the batch, and first calls that find nothing in the
    processor's caches. Neither is known where one of the four was not timed.
    """
    logits = times.method_call_time(DENSE, "GPTModel._postprocess")
    forward, backward = (times.time_beside_layers(DENSE, part) for part in ("forward", "backward"))
    known = None not in (logits, forward, backward, embedding_backward)
    if not known or "norm" not in modules:
        return
    assert logits is not None and embedding_backward is not None
    norm = modules["norm"]
    _put(modules, "embedding", _rest(forward, norm["forward_s"] + logits), embedding_backward)
    _put(modules, "head", logits, _rest(backward, norm["backward_s"] + embedding_backward))


MOE_LAYER = {
    "norm_linear": 1.0, "linear": 1.0, "rope": 2.0, "attention": 1.0, "self_attention": 1.0, "bias_dropout_add": 2.0,
    "layer": 1.0, "norm": 1.0, "router": 1.0, "dispatch": 1.0, "permute": 1.0, "unpermute": 1.0, "sort_chunks": 2.0,
    "experts": 1.0, "weighted_swiglu": 1.0,
}  # fmt: skip
"""A layer of experts but for its grouped linears and its own Python."""


def _experts(times: HostTimesOverSmallLayer, modules: dict[str, RelativeSeconds], back: float) -> None:
    """Router, dispatcher and what is left of a layer of experts: forward its own Python, back the grouped linears'."""

    def behind(*chains: str) -> float | None:
        some = [
            value
            for chain in chains
            if (value := times.median_time_of_op(chain, "bwd", experts=MOE_EXPERTS)) is not None
        ]
        return back * sum(some) if len(some) == len(chains) else None

    router_back = behind("router_gate", "router_topk")
    _put(modules, "router", times.method_call_time(MOE, "MoELayer.route"), router_back)
    _put(modules, "fused_router", times.method_call_time(FUSED_ROUTER, "MoELayer.route"), router_back)
    prepared = times.method_call_time(MOE, "MoELayer.preprocess")
    _put_forward(modules, "dispatch", _rest(prepared, _sum(modules, "forward_s", {"permute": 1.0})))
    weighted, grouped = _sum(modules, "forward_s", {"weighted_swiglu": 1.0}), modules.get("grouped_linear")
    if grouped is None or weighted is None:
        return
    inside = weighted + 2.0 * _of_members(grouped, "forward", MOE_EXPERTS)
    _put_forward(modules, "experts", _rest(times.method_call_time(MOE, "TEGroupedMLP.forward"), inside))
    ahead, behind_all = (_sum(modules, f"{direction}_s", MOE_LAYER) for direction in ("forward", "backward"))
    if ahead is None or behind_all is None:
        return
    layer = times.time_per_layer_with_dense_ends(MOE, "forward")
    _put_forward(modules, "moe_layer", _rest(layer, ahead + 2.0 * _of_members(grouped, "forward", MOE_EXPERTS)))
    backs = _products(times, behind_all, ONE_GPU_EXPERTS)
    if (line := line_of_least_relative_errors(backs)) is not None:
        grouped["backward_s"], grouped["backward_each_s"] = line
    elif MOE_EXPERTS in backs:  # what else is there, such as the hooks of parameters
        more = backs[MOE_EXPERTS] - _of_members(grouped, "backward", MOE_EXPERTS)
        grouped["backward_s"] += max(more, 0.0)
    _exchanges(times, modules, behind_all)


def _products(times: HostTimesOverSmallLayer, others: float, models: Mapping[str, int]) -> dict[int, float]:
    """What a grouped linear takes back with the hooks of its parameters, by its experts: half of what is left of a
    layer's way back without the others."""
    layers = {n: times.time_per_layer_with_dense_ends(model, "backward") for model, n in models.items()}
    return {n: (layer - others) / 2.0 for n, layer in layers.items() if layer is not None and layer > others}


EXCHANGES = (4.0, 3.0)
"""Collectives of a layer's experts, each way: forward their counts as well as tokens, weights and outputs. [-]"""
PARTS_OF_EXCHANGE = ("MoELayer.preprocess", "MoELayer.dispatch", "MoELayer.combine")


def _exchanges(times: HostTimesOverSmallLayer, modules: dict[str, RelativeSeconds], others: float) -> None:
    """A collective between ranks with experts of a layer: what its dispatcher's calls take longer over two of them, and
    a layer's way back. Forward a whole layer would hold what one rank waits for the other. Back the least of models
    counts: of few experts the line over their number says too little."""
    called = [
        [times.method_call_time(model, part) for part in PARTS_OF_EXCHANGE] for model in (MOE, *EXCHANGED_EXPERTS)
    ]
    known = [sum(part for part in parts if part is not None) for parts in called if None not in parts]
    halves = _products(times, others, EXCHANGED_EXPERTS)
    if len(known) == len(called) and halves:
        behind = min(2.0 * (half - _of_members(modules["grouped_linear"], "backward", n)) for n, half in halves.items())
        _put(modules, "exchange", (median(known[1:]) - known[0]) / EXCHANGES[0], behind / EXCHANGES[1])


def _of_members(ways: RelativeSeconds, direction: str, members: int) -> float:
    return ways[f"{direction}_s"] + members * ways[f"{direction}_each_s"]


def layer_time_over_small_op(rows: Iterable[Row]) -> tuple[float, float] | None:
    """The layer over the small op of the same moments, each way, in the middle of cases; None of rows without. [-]"""
    paces: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.case.family == FAMILY and row.case.variant in PACES:
            paces[row.case.variant].append(row.sample.median_s)
    if any(name not in paces for name in PACES):
        return None
    small, ahead, behind = (median(paces[name]) for name in PACES)
    return ahead / small, behind / small


def module_host_facts(
    modules: Mapping[str, RelativeSeconds], layer: SmallLayerTime, source: str
) -> dict[str, dict[str, Any]]:
    """What :func:`module_times_over_small_layer` found as a profile holds it, of a host on which a layer takes so long.
    [s]

    Examples
    --------
    >>> facts = module_host_facts({"rope": {"forward_s": 0.04}}, SmallLayerTime(1e-3, 2e-3), "an example")
    >>> facts["rope"]["forward_s"]["value"]
    '40 us'
    """

    def fact(direction: str, layers: float) -> dict[str, Any]:
        seconds = layers * (layer.issue_s if direction.startswith("forward") else layer.back_s)
        return {"value": f"{seconds * 1e6:.4g} us", "provenance": "measured", "source": source}

    return {
        name: {direction: fact(direction, value) for direction, value in ways.items()}
        for name, ways in sorted(modules.items())
    }


def small_layer_host_facts(layer: SmallLayerTime, source: str) -> dict[str, dict[str, Any]]:
    """A layer's times as a profile holds them."""
    return {
        f"layer_{direction}": {"value": f"{seconds * 1e6:.4g} us", "provenance": "measured", "source": source}
        for direction, seconds in layer._asdict().items()
    }
