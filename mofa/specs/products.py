"""Kinds of matrix products and of fp8 casts, and which stand in where a GPU's own were not measured."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

GemmFormat = Literal[
    "bf16", "fp8", "fp32", "fp8_fast", "fp8_split", "fp8_block", "fp8_block_rows", "mxfp8", "fp8_rows", "fp8_rows_hp",
]  # fmt: skip
"""What selects a product's kernels. ``fp8`` is PyTorch's scaled product; the others are Transformer Engine's: one scale
a tensor with fast accumulation and with split accumulators (promoted to fp32 as the sum goes on), blocks of 1 x 128 by
blocks of 128 x 128, blocks of 1 x 128 on both sides, as weight gradients have them, and blocks of 1 x 32 on both sides,
which Blackwell's tensor cores scale themselves. ``fp8_rows`` is PyTorch's with a scale a row of either side
(``fp8_rows_hp`` where the weight's gradient is in bf16)."""
ELEMENT_BYTES: dict[str, float] = {
    "bf16": 2.0, "fp8": 1.0, "fp32": 4.0, "fp8_fast": 1.0, "fp8_split": 1.0, "fp8_block": 1.0, "fp8_block_rows": 1.0,
    "mxfp8": 1.0, "fp8_rows": 1.0, "fp8_rows_hp": 1.0,
}  # fmt: skip
"""Bytes of an operand's element in each format. [B]"""
FALLBACK: dict[GemmFormat, GemmFormat] = {
    "fp8_fast": "fp8", "fp8_split": "fp8", "fp8_block": "fp8", "fp8_block_rows": "fp8", "mxfp8": "fp8_fast",
    "fp8_rows": "fp8_fast", "fp8_rows_hp": "fp8_rows",
}  # fmt: skip
"""The format whose curve stands in where a GPU's own was not measured. Products of 1 x 32 blocks have the peak of those
with one scale a tensor (NVIDIA's tables of Blackwell have one rate for both), and add up in fp32 either way. With
a scale a row cuBLAS multiplies alike and scales what comes out."""


def known_or_stand_in_format(kind: GemmFormat, known: Collection[str]) -> GemmFormat:
    """The format itself, or the first that stands in for it among those that are known; the last one if none is.

    Examples
    --------
    >>> known_or_stand_in_format("mxfp8", ("bf16", "fp8")), known_or_stand_in_format("mxfp8", ("fp8_fast", "fp8"))
    ('fp8', 'fp8_fast')
    >>> known_or_stand_in_format("bf16", ())
    'bf16'
    """
    while kind not in known and kind in FALLBACK:
        kind = FALLBACK[kind]
    return kind


STREAM_FALLBACK = dict.fromkeys(
    ("fp8_cast_delayed", "fp8_cast_tensorwise", "fp8_cast_block", "fp8_cast_both_delayed", "fp8_cast_both_tensorwise",
     "fp8_cast_both_block", "fp8_cast_weight_block", "fp8_cast_column_block", "fp8_transpose", "fp8_cast_main"),
    "cast_down",
)  # fmt: skip
"""Memory-bound ops of Transformer Engine's fp8 layers, and the op whose rate stands in where they were not measured."""
