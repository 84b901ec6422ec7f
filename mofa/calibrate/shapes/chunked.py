"""The cases of the chunked MoE layer: true widths, token chunks, skews; never fitted on, only held against."""

from __future__ import annotations

from collections.abc import Sequence

from mofa.calibrate.cases import Case, Shape, grid_and_held_out_cases

FAMILY = "chunked_moe"
ISSUE = "host_issue"
"""Row of a layer: seconds in which its host issues one small eager op, as a profile has it."""
OPS = (ISSUE, "forward", "backward", "static_bytes", "peak_bytes", "reserved_bytes", "step")
"""Rows of one layer: its host's speed, its phases' times, what is allocated before it, the peaks of a step, and last
the whole time."""
WIDTHS: tuple[tuple[str, Shape, tuple[int, ...]], ...] = (
    ("qwen3-30b-a3b", {"hidden": 2048, "ffn": 768, "experts": 128, "top_k": 8}, (8192, 16384)),
    ("deepseek-v3 with 64 experts", {"hidden": 7168, "ffn": 2048, "experts": 64, "top_k": 8}, (4096, 16384)),
)
"""Model, sizes of its layer, tokens a rank. DeepSeek-V3 has 256 experts; of 64 on two ranks each holds 32."""
CHUNKS = (1, 2, 4, 8)
SKEWS = ("0.0", "0.25", "0.5", "1.0")
"""Exponents of a Zipf law over the experts, the popular ones on the first rank; 0.0 is balanced."""
ONE_GPU_SKEWS = ("0.0", "1.0")
FRESH_WIDTHS: tuple[tuple[str, Shape], ...] = (
    ("mixtral-8x7b", {"tokens": 8192, "hidden": 4096, "ffn": 14336, "experts": 8, "top_k": 2}),
    ("gpt-oss-120b", {"tokens": 16384, "hidden": 2880, "ffn": 2880, "experts": 128, "top_k": 4}),
    ("deepseek-v2-lite", {"tokens": 32768, "hidden": 2048, "ffn": 1408, "experts": 64, "top_k": 6}),
    ("qwen3-235b-a22b", {"tokens": 6144, "hidden": 4096, "ffn": 1536, "experts": 128, "top_k": 8}),
    ("OLMoE-1B-7B", {"tokens": 12288, "hidden": 2048, "ffn": 1024, "experts": 64, "top_k": 8}),
    ("mixtral-8x22b", {"tokens": 4096, "hidden": 6144, "ffn": 16384, "experts": 8, "top_k": 2}),
)
"""The second held-out set: other widths and lengths, predicted before anyone measured them."""
FRESH_SKEWS = ("0.0", "0.35", "0.7", "1.2")
"""Each width meets each, in another number of chunks; the next group of ranks begins with the next."""
SMALL: Shape = {"tokens": 64, "hidden": 32, "ffn": 16, "experts": 8, "top_k": 2}
"""What a host without a GPU runs, to try the bench out."""


def chunked_layer_cases(gpus: int) -> list[Case]:
    """One case a layer, of ``step``; the bench writes a row for each of :data:`OPS`. ``gpus`` 0 is a host's small ones.

    Held out, and a second set (``fresh``) that was predicted before it was measured.

    Examples
    --------
    >>> [sum(case.split == "heldout" for case in chunked_layer_cases(gpus)) for gpus in (1, 2, 4)]
    [32, 64, 128]
    >>> [sum(case.split == "fresh" for case in chunked_layer_cases(gpus)) for gpus in (0, 1, 2, 4)]
    [0, 24, 24, 48]
    """
    groups = [p for p in (1, 2, 4, 8) if p == gpus == 1 or 1 < p <= gpus]
    if not gpus:
        shapes = [{**SMALL, "ep": ep, "chunks": c, "skew": s} for ep in (1, 2) for c in (1, 4) for s in ("0.0", "1.0")]
    else:
        shapes = [
            {"tokens": tokens, **sizes, "ep": ep, "chunks": chunks, "skew": skew}
            for ep in groups
            for _, sizes, lengths in WIDTHS
            for tokens in lengths
            for skew in (SKEWS if ep > 1 else ONE_GPU_SKEWS)
            for chunks in CHUNKS
        ]
    items, fresh = ([("step", "grouped_mm", "bf16", shape) for shape in some] for some in (shapes, _fresh(groups)))
    return grid_and_held_out_cases(FAMILY, [], items, len(items), fresh, len(fresh))


def _fresh(groups: Sequence[int]) -> list[Shape]:
    """Shapes of the second set for each number of ranks."""
    return [
        {**sizes, "ep": ep, "chunks": chunks, "skew": FRESH_SKEWS[(i + j + ep) % len(FRESH_SKEWS)]}
        for ep in groups
        for i, (_, sizes) in enumerate(FRESH_WIDTHS)
        for j, chunks in enumerate(CHUNKS)
    ]


def token_copies_by_expert_of_rank(tokens: int, top_k: int, experts: int, skew: float) -> list[int]:
    """Copies that each expert gets of one rank's tokens: a Zipf law, no expert more than one copy of a token.

    What the most popular experts cannot take goes to the others in proportion; the rest of the rounding to the
    largest remainders.

    Examples
    --------
    >>> copies = token_copies_by_expert_of_rank(4096, 8, 64, 1.0)
    >>> token_copies_by_expert_of_rank(64, 2, 8, 0.0), sum(copies), max(copies)
    ([16, 16, 16, 16, 16, 16, 16, 16], 32768, 4096)
    """
    weights = [(i + 1.0) ** -skew for i in range(experts)]
    wanted, full = [0.0] * experts, 0
    while True:  # popular experts come first, so that the full ones are a beginning
        left, share = tokens * (top_k - full), sum(weights[full:])
        wanted[full:] = [left * w / share for w in weights[full:]]
        over = sum(w > tokens for w in wanted[full:])
        if not over:
            break
        wanted[full : full + over] = [float(tokens)] * over
        full += over
    loads = [int(w) for w in wanted]
    by_rest = sorted(range(experts), key=lambda i: (loads[i] - wanted[i], i))
    for i in by_rest[: tokens * top_k - sum(loads)]:
        loads[i] += 1
    return loads


def token_rows_by_rank(shape: Shape) -> list[int]:
    """Token rows that each rank's experts receive from all ranks in one layer.

    Examples
    --------
    >>> token_rows_by_rank({**SMALL, "ep": 2, "skew": "0.0"}), token_rows_by_rank({**SMALL, "ep": 2, "skew": "1.0"})
    ([128, 128], [196, 60])
    """
    tokens, top_k, experts, ep = (int(shape[name]) for name in ("tokens", "top_k", "experts", "ep"))
    loads, local = token_copies_by_expert_of_rank(tokens, top_k, experts, float(shape["skew"])), experts // ep
    return [ep * sum(loads[r * local : (r + 1) * local]) for r in range(ep)]
