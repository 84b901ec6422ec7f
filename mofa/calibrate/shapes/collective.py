"""The shapes of collectives: powers of two to fit on, payloads of the bundled workloads held out."""

from __future__ import annotations

import random

from mofa.calibrate.cases import FRESH_SEED, MODELS, SEED, Case, Item, Shape, grid_and_held_out_cases

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_uneven", "send_recv")
COMPUTED = ("product", "stream")
"""What runs before and after a collective that depends on it: a square product's kernel, or one bound by memory."""

LAYERS_BESIDE = (
    (16384, 2048, 8192), (12288, 4096, 16384), (8192, 4096, 14336), (4096, 5120, 20480), (6144, 7168, 28672),
    (4096, 8192, 28672),
)  # fmt: skip
"""Tokens, hidden size and feed-forward width of dense layers from 1B to 70B."""
HELD_MULTIPROCESSORS = "held_multiprocessors"
"""Family of those layers beside a kernel that holds multiprocessors, as NCCL's channels do between nodes."""
NUM_HELD = {"spin": (1, 2, 4, 8, 16, 24, 32), "copy": (4, 8, 16)}
"""Multiprocessors held by a kernel that waits, and by one that copies at the rate of a port. [-]"""
PORT_BYTES_PER_S = 45_000_000_000
"""What a port of 400 Gb/s gives a large message: 0.9 of 50 GB/s. [B/s]"""
TIMED_BESIDE_HELD = ("layers_alone", "layers_overlapped", "multiprocessors_held")
"""The three rows of a shape: layers alone, layers beside the kernel, and how long it held multiprocessors meanwhile."""


def collective_group_sizes(gpus: int) -> list[int]:
    """Sizes of groups to time: powers of two up to the GPUs there are, and all of them."""
    return sorted({p for p in (2, 4, 8) if p <= gpus} | ({gpus} if gpus > 1 else set()))


def collective_cases(gpus: int) -> list[Case]:
    """Collectives by group and payload: the whole tensor, before it is sharded; of all-to-all and send/recv, what one
    rank sends."""
    rng = random.Random(SEED + 10)
    grid: list[Item] = []
    for group in collective_group_sizes(gpus):
        for op in OPS:
            for exponent in range(12, 31):
                grid.append((op, "nccl", "bf16", collective_shape(op, 2**exponent, group)))
    held_out = held_out_collective_cases(rng, gpus, (1, 2, 4, 8))
    fresh = held_out_collective_cases(random.Random(FRESH_SEED + 10), gpus, (1, 2, 3, 4, 5, 6, 8, 12))
    several = gpus > 1
    return grid_and_held_out_cases("collective", grid, held_out, 120 if several else 0, fresh, 100 if several else 0)


def held_out_collective_cases(rng: random.Random, gpus: int, parts: tuple[int, ...]) -> list[Item]:
    """Payloads of the bundled workloads: activations of a part of the sequence, weights or gradients of a layer."""
    held_out: list[Item] = []
    for _ in range(2000):
        group = rng.choice(collective_group_sizes(gpus) or [2])
        op, model = rng.choice(OPS), rng.choice(MODELS)
        tokens = rng.choice((1, 1, 2)) * model.seq_len // rng.choice(parts)
        elements = tokens * model.hidden
        if op.startswith("all_to_all"):
            elements *= model.top_k or 1
        elif rng.random() < 0.4 and op in ("all_gather", "reduce_scatter"):
            elements = 4 * model.hidden**2 // rng.choice((1, 2, 4, 8))
        size = 2 * elements // 4096 * 4096
        if 2**20 <= size <= 2**30:
            held_out.append((op, "nccl", "bf16", collective_shape(op, size, group)))
    return held_out


def collective_shape(op: str, size: int, group: int) -> Shape:
    """A collective's sizes by their names in the CSV; ``skew`` is the busiest rank's share over the mean one's in an
    uneven all-to-all."""
    shape: Shape = {"bytes": size, "group": 2 if op == "send_recv" else group}
    return {**shape, "skew": "1.5"} if op == "all_to_all_uneven" else shape


def overlap_cases(gpus: int) -> list[Case]:
    """Products and streams beside collectives, and layers beside the one that carries their bf16 parameters."""
    grid: list[Item] = []
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all") if gpus > 1 else ():
        for size in (2**25, 2**28):
            for m, n, k in ((8192, 8192, 8192), (4096, 4096, 4096)):
                grid.append((op, "gemm", "bf16", {"bytes": size, "group": gpus, "m": m, "n": n, "k": k}))
            grid.append((op, "stream", "bf16", {"bytes": size, "group": gpus, "m": 8192, "n": 8192, "k": 0}))
    for op in ("all_gather", "reduce_scatter") if gpus > 1 else ():
        for tokens, hidden, ffn in LAYERS_BESIDE:
            size = 2 * (4 * hidden**2 + 2 * hidden * ffn)
            grid.append((op, "layer", "bf16", {"bytes": size, "group": gpus, "m": tokens, "n": hidden, "k": ffn}))
    return grid_and_held_out_cases("overlap", grid, [], 0)


def held_multiprocessor_cases() -> list[Case]:
    """Layers beside a kernel that holds multiprocessors; it waits, or copies as slowly as a port does."""
    grid: list[Item] = []
    for tokens, hidden, ffn in LAYERS_BESIDE:
        for op, numbers in NUM_HELD.items():
            rate: Shape = {"bytes_per_s": PORT_BYTES_PER_S} if op == "copy" else {}
            for number in numbers:
                shape: Shape = {"multiprocessors": number, **rate, "m": tokens, "n": hidden, "k": ffn}
                grid += [(op, timed, "bf16", shape) for timed in TIMED_BESIDE_HELD]
    return grid_and_held_out_cases(HELD_MULTIPROCESSORS, grid, [], 0)


def dependent_collective_cases(gpus: int) -> list[Case]:
    """Collectives that wait for a computation and are waited for, as those of a step: beside products and streams."""
    grid: list[Item] = []
    for group in collective_group_sizes(gpus):
        for op in OPS:
            if op != "all_to_all_uneven" and not (op == "send_recv" and group > 2):
                for exponent in range(18, 29, 2):
                    grid += [(op, beside, "bf16", collective_shape(op, 2**exponent, group)) for beside in COMPUTED]
    held_out = [
        (op, COMPUTED[n % 2], dtype, shape)
        for n, (op, _, dtype, shape) in enumerate(
            held_out_collective_cases(random.Random(SEED + 11), gpus, (1, 2, 4, 8))
        )
        if op != "all_to_all_uneven" and int(shape["bytes"]) <= 2**28
    ]
    return grid_and_held_out_cases("dependent_collective", grid, held_out, 40 if gpus > 1 else 0)
