"""The shapes of memory-bound ops on routed tokens, whose copies are strided, broadcast or repeated."""

from __future__ import annotations

from mofa.calibrate.cases import Case, Item, grid_and_held_out_cases

FAMILY = "routed"
COPIES = 8
"""Copies of a token, as top-8 routing makes them."""
ACTIVATIONS = ("swiglu_halves_fwd", "swiglu_halves_bwd")
ROWS = ("gather_copies", "weigh_copies", "sum_copies", "dot_copies")
TOPS = (2, 4, 6, 8)
"""Experts of a token whose outputs its scores are multiplied with."""
INDEXED = ("index_put", "index_put_fp32", "index_backward", "index_backward_fp32", "row_backward", "row_backward_fp32")
"""Rows written to places, gradients of a token's copies added up, gradients of rows that are taken once each."""
REPEATED = "index_backward_row"
"""Gradients that all go to one row, one after the other."""
PRODUCTS = tuple(
    f"score_product{suffix}_top{top}{dtype}" for suffix in ("", "_bwd") for top in TOPS for dtype in ("", "_fp32")
)
OPS = (*ACTIVATIONS, *ROWS, *INDEXED, REPEATED, *PRODUCTS)
BY_BYTES = (*INDEXED, *PRODUCTS)
"""Ops that tapes give by their bytes alone: what a row or a column costs is not told apart."""
BYTES = {"swiglu_halves_fwd": 10.0, "swiglu_halves_bwd": 22.0, "gather_copies": 4.0, "weigh_copies": 4.0,
         "sum_copies": 2.0 + 2.0 / COPIES, "dot_copies": 6.0 + 2.0 / COPIES, "index_put": 4.0, "index_put_fp32": 8.0,
         "index_backward": 2.0, "index_backward_fp32": 4.0, "row_backward": 6.0, "row_backward_fp32": 12.0,
         REPEATED: 2.0}  # fmt: skip
"""Bytes moved per element of the rows, kernel by kernel. [B]"""
READ_AGAIN = {"gather_copies": 2.0 / COPIES}
"""Bytes per element of the rows in the source of ops that read it again and again, in no order. [B]"""


def top_k_of_op(op: str) -> int:
    """Experts per token (top-k) that the name of a case's op says.

    Examples
    --------
    >>> top_k_of_op("score_product_bwd_top6_fp32")
    6
    """
    return int(op.removesuffix("_fp32").rpartition("_top")[2])


def scored_product_bytes_per_element(op: str) -> float:
    """Bytes that a product with scores moves per element of the experts' outputs, back read and written. [B]

    Examples
    --------
    >>> scored_product_bytes_per_element("score_product_top8")
    2.25
    >>> scored_product_bytes_per_element("score_product_bwd_top8_fp32")
    9.0
    """
    element, passes_over = (4.0 if op.endswith("_fp32") else 2.0), (2.0 if "_bwd_" in op else 1.0)
    return passes_over * element * (1.0 + 1.0 / top_k_of_op(op))


BYTES |= {op: scored_product_bytes_per_element(op) for op in PRODUCTS}


def routed_cases() -> list[Case]:
    """Cases of ops over tokens routed to experts: a grid of each, and shapes of other widths and lengths held out."""
    grid: list[Item] = []
    held_out: list[Item] = []
    wide = ((4096, 2048), (16384, 2048), (65536, 2048), (131072, 2048), (262144, 1024), (32768, 4096), (8192, 7168),
            (32768, 7168), (131072, 7168), (65536, 5120))  # fmt: skip
    narrow = ((4096, 768), (16384, 768), (65536, 768), (131072, 768), (8192, 2048), (32768, 2048), (131072, 2048),
              (65536, 1408), (16384, 4096), (8192, 14336))  # fmt: skip
    held_wide = ((8192, 2880), (24576, 2048), (98304, 4096), (49152, 7168), (196608, 2048), (12288, 6144))
    held_narrow = ((24576, 1536), (98304, 768), (49152, 2048), (12288, 2880), (131072, 1408))
    for op in (*ACTIVATIONS, *ROWS):
        sizes, others = (narrow, held_narrow) if op in ACTIVATIONS else (wide, held_wide)
        grid += [(op, "eager", "bf16", {"tokens": rows, "width": width}) for rows, width in sizes]
        held_out += [(op, "eager", "bf16", {"tokens": rows, "width": width}) for rows, width in others]
    tokens = ((2048, 2048), (4096, 2048), (8192, 2048), (16384, 2048), (4096, 4096), (4096, 7168), (8192, 2880))
    held_tokens = ((6144, 2048), (4096, 5120), (12288, 2880))
    for op in (*INDEXED, *PRODUCTS):
        dtype, top = ("fp32" if op.endswith("_fp32") else "bf16"), (top_k_of_op(op) if op in PRODUCTS else COPIES)
        grid += [(op, "eager", dtype, {"tokens": t * top, "width": width}) for t, width in tokens]
        held_out += [(op, "eager", dtype, {"tokens": t * top, "width": width}) for t, width in held_tokens]
    times = ((64, 2048), (128, 2048), (256, 2048), (512, 2048), (512, 4096), (512, 7168), (1024, 2048))
    grid += [(REPEATED, "eager", "bf16", {"tokens": rows, "width": width}) for rows, width in times]
    held_out += [(REPEATED, "eager", "bf16", {"tokens": 384, "width": 2880})]
    return grid_and_held_out_cases(FAMILY, grid, held_out, len(held_out))
