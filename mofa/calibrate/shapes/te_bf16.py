"""The shapes of Transformer Engine's kernels as Megatron-Core calls them: products, attention, memory-bound ops.

Fits see products of random widths and a part of the models'; the other models' products, other lengths and other
numbers of experts are held out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from mofa.calibrate.cases import FRESH_SEED, SEED, Case, Item, Shape, grid_and_held_out_cases, log_uniform_multiple

GROUPED, ATTENTION, OPS, WGRAD, HOST = "te_experts", "te_attention", "te_ops", "te_wgrad", "te_expert_host"
TE_BF16_FAMILIES = (GROUPED, ATTENTION, WGRAD, HOST, OPS)
"""Measured where Transformer Engine is installed. `te_ops` comes last: its kernels are compiled when first called."""
VARIANT = "te"
LAYOUTS = ("fwd", "dgrad", "wgrad")
TOP_K = 8
EXPERTS: dict[str, tuple[int, int, int]] = {
    "mixtral-8x7b": (8, 4096, 14336), "deepseek-v2-lite": (64, 2048, 1408), "deepseek-v3": (32, 7168, 2048),
    "qwen3-30b-a3b": (128, 2048, 768), "olmoe": (64, 2048, 1024), "gpt-oss-120b": (32, 2880, 2880),
}  # fmt: skip
"""Experts of one rank at most, the model's width and an expert's."""
SPREADS = ("even", "routed", "zipf", "lognormal")
"""How an expert's rows are drawn: all alike; token by token; by a Zipf law with exponent 0.8; log-normal with a spread
of 1 in the logarithm, whose smallest experts get nothing."""
MAX_WEIGHT, MAX_WORK = 1.1e9, 2e12
"""Of a case: elements of all experts' weights, and multiplications. [-]"""
ROUTERS = ("softmax", "presoftmax", "sigmoid", "grouped_sigmoid")
"""Scores: softmax over the chosen experts, over all of them before they are chosen, sigmoid, sigmoid with experts in
groups, as DeepSeek-V3 has them."""
TE_BYTES: dict[str, float] = {
    "permute_fwd": 2.0 * (1 + 1 / TOP_K), "permute_bwd": 2.0 * (1 + 1 / TOP_K), "unpermute_fwd": 2.0 * (1 + 1 / TOP_K),
    "unpermute_bwd": 2.0 * (1 + 1 / TOP_K), "sort_fwd": 4.0, "sort_bwd": 4.0, "row_map": 21.0, "rmsnorm_fwd": 4.0,
    "rmsnorm_bwd": 6.0, "layernorm_fwd": 4.0, "layernorm_bwd": 6.0, "rope_fwd": 4.0, "rope_bwd": 4.0,
    "weighted_swiglu_fwd": 6.0, "weighted_swiglu_bwd": 10.0,
    "swiglu_fwd": 6.0, "swiglu_bwd": 10.0, "adam": 28.0, "grad_norm": 4.0, "grad_clip": 8.0,
    "router_drop_fwd": 30.0, "router_drop_bwd": 9.0,
    "router_gate_fwd": 2.0, "router_gate_bwd": 10.0, "mla_q_fwd": 4.0, "mla_kv_fwd": 4.0,
    "chunk_order": 4.0, "geglu_fwd": 6.0, "geglu_bwd": 10.0, "squared_relu_fwd": 4.0, "squared_relu_bwd": 6.0,
    "bias_gelu_fwd": 4.0, "bias_gelu_bwd": 6.0, "loss_fwd": 38.0, "loss_bwd": 14.0, "compiled_loss_fwd": 22.0,
    "compiled_loss_bwd": 18.0, "zero_buffer": 4.0,
}  # fmt: skip
"""Bytes that each op reads and writes once per element of its main tensor; 8 where none is given. [B]"""

NORMS = ((2048, 2048), (4096, 2048), (16384, 2048), (4096, 4096), (8192, 4096), (4096, 8192), (8192, 7168),
         (4096, 512), (131072, 128))  # fmt: skip
DROPPED = ((1024, 64, 8), (4096, 64, 8), (16384, 64, 8), (4096, 128, 8), (8192, 256, 8), (8192, 8, 2), (2048, 16, 2),
           (4096, 32, 4), (16384, 128, 8))  # fmt: skip
HELD_DROPPED = ((8192, 128, 8), (4096, 8, 2), (8192, 64, 6), (2048, 256, 8))
"""Tokens, experts, and how many a token chooses, of which as many tokens stay as are an even share."""
HELD_NORMS = ((8192, 2880), (4096, 5120), (4096, 1536))
DENSE = ((1024, 8192), (2048, 2048), (2048, 14336), (4096, 4096), (4096, 8192), (4096, 14336), (8192, 5632),
         (8192, 8192), (8192, 14336))  # fmt: skip
HELD_DENSE = ((4096, 11008), (8192, 12288), (8192, 7168))
"""Rows and widths of a dense layer's activation."""
OTHER_ACTIVATIONS = ("geglu", "squared_relu", "bias_gelu")
"""Compiled ones of dense layers beside SwiGLU: of Gemma's kind, of Nemotron's, of GPT-3's."""
LOSSES = ("loss_fwd", "loss_bwd", "compiled_loss_fwd", "compiled_loss_bwd")
"""Megatron's cross entropy over a vocabulary; bytes as `mofa.blocks.frameworks.megatron.loss` counts them."""
LOGITS = ((2048, 32768), (8192, 32000), (1024, 100352), (2048, 151936), (8192, 128256))
HELD_LOGITS = ((4096, 50304), (8192, 100352), (8192, 256000))
"""Tokens and the size of their vocabulary."""
BUFFERS, HELD_BUFFERS = (2 * 10**8, 4 * 10**8, 10**9, 2 * 10**9, 4 * 10**9), (6 * 10**8,)
"""Parameters whose fp32 gradients are zeroed at once."""
HEADS = ((2048, 4096), (4096, 512), (4096, 1024), (4096, 4096), (8192, 4096), (16384, 4096), (8192, 8192))
"""Tokens and the width of all heads of 128."""
CHUNKS = (((128, 128, 32, 8), 2048), ((128, 128, 32, 8), 4096), ((128, 128, 32, 8), 8192), ((128, 128, 24, 8), 4096),
          ((192, 128, 16, 16), 4096), ((64, 64, 32, 32), 4096))  # fmt: skip
"""Head sizes and numbers of heads, and the queries of a chunk of a sequence over two, three and four chunks' keys."""
PERMUTED = ((512, 2048), (2048, 2048), (4096, 2048), (8192, 2048), (16384, 2048), (1024, 4096), (4096, 4096),
            (8192, 4096))  # fmt: skip


def expert_rows_text(rng: random.Random, rows: int, groups: int, spread: str) -> str:
    """Rows of each expert, as text; their sum is near ``rows * groups``.

    Examples
    --------
    >>> expert_rows_text(random.Random(0), 96, 4, "even")
    '96,96,96,96'
    """
    total = rows * groups
    if spread == "even":
        return ",".join([str(rows)] * groups)
    if spread == "routed":  # a binomial count by its normal approximation
        loads = [round(rng.gauss(rows, math.sqrt(rows))) for _ in range(groups)]
    else:
        if spread == "zipf":
            weights = [(i + 1.0) ** -0.8 for i in range(groups)]
            rng.shuffle(weights)
        else:
            weights = [math.exp(rng.gauss(0.0, 1.0)) for _ in range(groups)]
        scale = total / sum(weights)
        loads = [round(w * scale) for w in weights]
        if spread == "lognormal" and groups > 2:
            for i in sorted(range(groups), key=lambda i: loads[i])[: max(1, groups // 8)]:
                loads[i] = 0
    return ",".join(str(max(0, load)) for load in loads) if sum(loads) > 0 else str(total)


def _product(rng: random.Random, i: int, groups: int, n: int, k: int, low: int = 16) -> Item | None:
    if groups * n * k > MAX_WEIGHT:
        return None
    high = int(min(8192, MAX_WORK / (groups * n * k)))
    if high < low:
        return None
    rows, spread = log_uniform_multiple(rng, low, high, 1), SPREADS[rng.choice((0, 1, 1, 2, 3))]
    if spread == "even":
        rows = max(16, rows // 16 * 16)
    shape: Shape = {"n": n, "k": k, "spread": spread, "loads": expert_rows_text(rng, rows, groups, spread)}
    return LAYOUTS[i % 3], "multi_stream", "bf16", shape


def _model_products(rng: random.Random, num: int, models: Sequence[str]) -> list[Item]:
    items: list[Item] = []
    for i in range(num):
        most, hidden, ffn = EXPERTS[rng.choice(models)]
        groups = max(1, most // rng.choice((1, 1, 2, 4, 8)))
        n, k = rng.choice(((2 * ffn, hidden), (hidden, ffn)))
        item = _product(rng, i, groups, n, k)
        if item is not None:
            items.append(item)
    return items


def te_grouped_product_cases() -> list[Case]:
    """Grouped products in the three layouts; the weights' gradients are added to fp32 ones."""
    rng = random.Random(SEED + 61)
    grid: list[Item] = []
    for i in range(150):
        groups = rng.choice((1, 2, 4, 8, 16, 32, 64, 128))
        n, k = log_uniform_multiple(rng, 512, 16384, 64), log_uniform_multiple(rng, 512, 8192, 64)
        item = _product(rng, i, groups, n, k)
        if item is not None:
            grid.append(item)
    grid += _model_products(rng, 110, ("mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b"))
    held_out = _model_products(rng, 300, ("deepseek-v3", "olmoe", "gpt-oss-120b", "qwen3-30b-a3b"))
    fresh = _model_products(random.Random(FRESH_SEED + 61), 200, tuple(EXPERTS))
    return grid_and_held_out_cases(GROUPED, grid, held_out, 80, fresh, 60)


def te_attention_cases() -> list[Case]:
    """Causal attention by head sizes, grouped queries and lengths; over more keys than queries, the last query sees
    all of them, as a chunk of a sequence does whose keys and values were gathered."""
    grid: list[Item] = []
    held_out: list[Item] = []
    sizes = ((128, 128, 32, 8), (128, 128, 16, 16), (192, 128, 16, 16), (64, 64, 64, 8))
    for op in ("fwd", "bwd"):
        for d_qk, d_v, heads, kv_heads in sizes:
            for length, batch in ((1024, 4), (2048, 2), (4096, 1), (8192, 1), (16384, 1)):
                grid.append((op, VARIANT, "bf16", _attention(batch, heads, kv_heads, length, d_qk, d_v)))
        for d_qk, d_v, heads, kv_heads, length, batch in (
            (128, 128, 32, 4, 4096, 2), (128, 128, 64, 8, 4096, 1), (192, 128, 64, 64, 4096, 1),
            (128, 128, 32, 8, 6144, 1), (192, 128, 16, 16, 2048, 1), (64, 64, 64, 8, 4096, 2),
        ):  # fmt: skip
            held_out.append((op, VARIANT, "bf16", _attention(batch, heads, kv_heads, length, d_qk, d_v)))
        for (d_qk, d_v, heads, kv_heads), length in CHUNKS:
            for chunks in (2, 3, 4):
                shape = _attention(1, heads, kv_heads, length, d_qk, d_v, chunks * length)
                grid.append((op, VARIANT, "bf16", shape))
    return grid_and_held_out_cases(ATTENTION, grid, held_out, len(held_out))


def _attention(
    batch: int, heads: int, kv_heads: int, length: int, d_qk: int, d_v: int, keys: int | None = None
) -> Shape:
    keys = length if keys is None else keys
    return {"b": batch, "hq": heads, "hkv": kv_heads, "q": length, "kv": keys, "dqk": d_qk, "dv": d_v, "causal": 1}


def te_weight_gradient_cases() -> list[Case]:
    """Weights' gradients added to fp32 ones by the product, which stands in for Apex's kernel."""
    rng = random.Random(SEED + 62)
    grid: list[Item] = []
    for _ in range(24):
        tokens = rng.choice((1024, 2048, 4096, 8192, 16384))
        shape: Shape = {
            "m": log_uniform_multiple(rng, 512, 16384, 128),
            "n": log_uniform_multiple(rng, 512, 8192, 128),
            "k": tokens,
        }
        grid.append(("wgrad", "accumulate", "bf16", shape))
    sizes = ((6144, 4096), (28672, 4096), (4096, 14336), (5120, 2048), (2048, 4096), (151936, 2048))
    held_out: list[Item] = [
        ("wgrad", "accumulate", "bf16", {"m": m, "n": n, "k": k}) for m, n in sizes for k in (4096, 8192)
    ]
    return grid_and_held_out_cases(WGRAD, grid, held_out, len(held_out))


def te_expert_host_cases() -> list[Case]:
    """What the host needs to issue a grouped product, by the number of experts."""
    items: list[Item] = [
        (f"grouped_{layout}", "python", "bf16", {"groups": groups, "n": 1024, "k": 1024, "rows": 64})
        for groups in (1, 2, 8, 32, 64, 128)
        for layout in LAYOUTS
    ]
    return grid_and_held_out_cases(HOST, items, [], 0)


def te_memory_bound_cases() -> list[Case]:
    """Memory-bound ops; tokens of a permutation are its routed rows."""
    grid: list[Item] = []
    held_out: list[Item] = []
    for op in ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd"):
        grid += [(op, VARIANT, "bf16", {"tokens": t, "width": w}) for t, w in NORMS]
        held_out += [(op, VARIANT, "bf16", {"tokens": t, "width": w}) for t, w in HELD_NORMS]
    for op in ("rope_fwd", "rope_bwd"):
        grid += [(op, VARIANT, "bf16", {"tokens": t, "width": w}) for t, w in HEADS]
        held_out += [(op, VARIANT, "bf16", {"tokens": t, "width": w}) for t, w in ((4096, 2048), (12288, 4096))]
    for params, tensors in ((10**8, 12), (10**8, 400), (3 * 10**8, 60), (10**9, 80), (10**9, 3000)):
        sizes: Shape = {"params": params, "tensors": tensors}
        grid += [(op, VARIANT, "fp32", sizes) for op in ("adam", "grad_norm", "grad_clip")]
    held_out += [
        (op, VARIANT, "fp32", {"params": 6 * 10**8, "tensors": 900}) for op in ("adam", "grad_norm", "grad_clip")
    ]
    grid += [("zero_buffer", "megatron", "fp32", {"params": params, "tensors": 1}) for params in BUFFERS]
    held_out += [("zero_buffer", "megatron", "fp32", {"params": params, "tensors": 1}) for params in HELD_BUFFERS]
    for op in LOSSES:
        grid += [(op, "megatron", "bf16", {"tokens": t, "width": v}) for t, v in LOGITS]
        held_out += [(op, "megatron", "bf16", {"tokens": t, "width": v}) for t, v in HELD_LOGITS]
    for score in ROUTERS:
        for direction in ("fwd", "bwd"):
            for variant in ("megatron", VARIANT):
                grid += [(f"router_{score}_{direction}", variant, "fp32", _routed(t, e, 8)) for t, e in
                         ((1024, 64), (4096, 64), (16384, 64), (4096, 128), (8192, 256))]  # fmt: skip
                held_out += [(f"router_{score}_{direction}", variant, "fp32", _routed(t, e, k)) for t, e, k in
                         ((8192, 128, 8), (4096, 8, 2))]  # fmt: skip
    for direction in ("fwd", "bwd"):
        grid += [(f"router_drop_{direction}", "megatron", "fp32", _routed(t, e, k)) for t, e, k in DROPPED]
        held_out += [(f"router_drop_{direction}", "megatron", "fp32", _routed(t, e, k)) for t, e, k in HELD_DROPPED]
        for variant in ("megatron", VARIANT):
            grid += [(f"aux_loss_{direction}", variant, "fp32", _routed(t, e, 8)) for t, e in
                     ((1024, 64), (4096, 64), (16384, 64), (4096, 128), (8192, 256))]  # fmt: skip
        grid += [(f"router_gate_{direction}", VARIANT, "fp32", {"tokens": t, "width": w, "experts": e}) for t, w, e in
                 ((1024, 2048, 64), (4096, 2048, 64), (4096, 2048, 128), (16384, 2048, 128), (4096, 7168, 256),
                  (8192, 4096, 8))]  # fmt: skip
        held_out.append((f"router_gate_{direction}", VARIANT, "fp32", {"tokens": 8192, "width": 2880, "experts": 32}))
    grid += [("row_map", VARIANT, "fp32", _routed(t, e, 8)) for t, e in
             ((1024, 64), (4096, 64), (16384, 64), (4096, 128), (8192, 256), (8192, 8))]  # fmt: skip
    for op in (f"{name}_{direction}" for name in ("permute", "unpermute", "sort") for direction in ("fwd", "bwd")):
        grid += [(op, VARIANT, "bf16", _copies(t, w, 64, TOP_K)) for t, w in PERMUTED]
        held_out += [(op, VARIANT, "bf16", _copies(4096, 2048, e, k)) for e, k in ((128, 8), (64, 6))]
    for direction in ("fwd", "bwd"):
        for width in (768, 2048):
            grid += [(f"weighted_swiglu_{direction}", VARIANT, "bf16", {"tokens": t, "width": width})
                     for t in (4096, 16384, 32768, 65536)]  # fmt: skip
            held_out.append((f"weighted_swiglu_{direction}", VARIANT, "bf16", {"tokens": 49152, "width": width}))
        grid += [(f"swiglu_{direction}", VARIANT, "bf16", {"tokens": t, "width": w}) for t, w in DENSE]
        held_out += [(f"swiglu_{direction}", VARIANT, "bf16", {"tokens": t, "width": w}) for t, w in HELD_DENSE]
        for name in OTHER_ACTIVATIONS:
            op = f"{name}_{direction}"
            grid += [(op, VARIANT, "bf16", {"tokens": t, "width": w}) for t, w in DENSE]
            held_out += [(op, VARIANT, "bf16", {"tokens": t, "width": w}) for t, w in HELD_DENSE]
    for op in ("mla_q_fwd", "mla_kv_fwd"):
        grid += [(op, VARIANT, "bf16", {"tokens": t, "width": 16 * (192 if op == "mla_q_fwd" else 256), "heads": 16})
                 for t in (1024, 2048, 4096, 8192, 16384)]  # fmt: skip
    grid += [("chunk_order", VARIANT, "bf16", {"tokens": t, "width": w, "chunks": c}) for t, w, c in
             ((8192, 1024, 4), (16384, 512, 4), (16384, 1024, 4), (16384, 2048, 8), (32768, 1024, 8))]  # fmt: skip
    held_out += [("chunk_order", VARIANT, "bf16", {"tokens": t, "width": w, "chunks": c}) for t, w, c in
                 ((16384, 1024, 8), (24576, 2048, 4))]  # fmt: skip
    return grid_and_held_out_cases(OPS, _by_width(grid), _by_width(held_out), len(held_out))


def _by_width(items: list[Item]) -> list[Item]:
    """Activations of one width one after the other, as each width is compiled anew."""
    last_items = [item for item in items if "swiglu" in item[0]]
    return [item for item in items if item not in last_items] + sorted(
        last_items, key=lambda item: (item[0].startswith("swiglu"), int(item[3]["width"]))
    )


def _copies(tokens: int, width: int, experts: int, top_k: int) -> Shape:
    return {"tokens": tokens * top_k, "width": width, "experts": experts, "top_k": top_k}


def _routed(tokens: int, experts: int, top_k: int) -> Shape:
    return {"tokens": tokens, "width": experts, "top_k": top_k}
