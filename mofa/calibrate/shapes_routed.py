"""The shapes of memory-bound ops on routed tokens, whose copies are strided, broadcast or repeated."""

from __future__ import annotations

from mofa.calibrate.cases import Case, Item, split_cases

FAMILY = "routed"
COPIES = 8
"""Copies of a token, as top-8 routing makes them."""
ACTIVATIONS = ("swiglu_halves_fwd", "swiglu_halves_bwd")
ROWS = ("gather_copies", "weigh_copies", "sum_copies", "dot_copies")
OPS = (*ACTIVATIONS, *ROWS)
BYTES = {"swiglu_halves_fwd": 10.0, "swiglu_halves_bwd": 22.0, "gather_copies": 4.0, "weigh_copies": 4.0,
         "sum_copies": 2.0 + 2.0 / COPIES, "dot_copies": 6.0 + 2.0 / COPIES}  # fmt: skip
"""Bytes moved per element of the rows, kernel by kernel. [B]"""
READ_AGAIN = {"gather_copies": 2.0 / COPIES}
"""Bytes per element of the rows in the source of ops that read it again and again, in no order. [B]"""


def routed_cases() -> list[Case]:
    """A grid of each op, and shapes of other widths and lengths held out."""
    grid: list[Item] = []
    held: list[Item] = []
    wide = ((4096, 2048), (16384, 2048), (65536, 2048), (131072, 2048), (262144, 1024), (32768, 4096), (8192, 7168),
            (32768, 7168), (131072, 7168), (65536, 5120))  # fmt: skip
    narrow = ((4096, 768), (16384, 768), (65536, 768), (131072, 768), (8192, 2048), (32768, 2048), (131072, 2048),
              (65536, 1408), (16384, 4096), (8192, 14336))  # fmt: skip
    held_wide = ((8192, 2880), (24576, 2048), (98304, 4096), (49152, 7168), (196608, 2048), (12288, 6144))
    held_narrow = ((24576, 1536), (98304, 768), (49152, 2048), (12288, 2880), (131072, 1408))
    for op in OPS:
        sizes, others = (narrow, held_narrow) if op in ACTIVATIONS else (wide, held_wide)
        grid += [(op, "eager", "bf16", {"tokens": rows, "width": width}) for rows, width in sizes]
        held += [(op, "eager", "bf16", {"tokens": rows, "width": width}) for rows, width in others]
    return split_cases(FAMILY, grid, held, len(held))
