"""What an op of the tape computes or moves: products, attention, memory-bound kernels, collectives, waits of the host.

A work says enough to time it on any GPU, and nothing of tensors, streams or where in a block it belongs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mofa.blocks.elementwise import FloatK, where

Format = Literal[
    "bf16", "fp8", "fp32", "fp8_fast", "fp8_split", "fp8_block", "fp8_block_rows", "mxfp8", "fp8_rows", "fp8_rows_hp",
]  # fmt: skip
"""As :data:`mofa.specs.curves.GemmFormat`."""
BACK_FORMATS: dict[Format, tuple[Format, Format]] = {
    "fp8_fast": ("fp8_split", "fp8_split"), "fp8_block": ("fp8_block", "fp8_block_rows"),
    "fp8_rows": ("fp8_split", "fp8_split"), "fp8_rows_hp": ("fp8_split", "bf16"),
}  # fmt: skip
"""Kinds of the products for the input's and the weight's gradient, where they differ from the forward's: backward with
split accumulators (Transformer Engine's module/base.py, ``_2X_ACC_DGRAD`` and ``_2X_ACC_WGRAD``; ``fp8_gemm_dgrad`` and
``fp8_gemm_wgrad`` of Float8CurrentScaling); no operand of a weight's gradient is a weight in square blocks. All three
products of 1 x 32 blocks are of one kind. torchao's with a scale a row are those with one scale a tensor on the way
back, scaled behind the product, or in bf16 for the weight's (torchao 0.17.0, float8_ops.py)."""
GemmPass = Literal["fwd", "dgrad", "wgrad"]
"""A linear layer's three products: its output, its input's gradient and its weight's gradient."""
Backend = Literal["cudnn", "flash", "flash1"]
GroupedKernel = Literal["one", "multi-stream"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """``count`` matrix products (m, k) x (k, n).

    ``product`` says which of a linear layer's three products it is: its output, the gradient of its input or, with the
    tokens as ``k``, of its weight. The widths of what is multiplied are ``n`` and ``k``, of a weight's gradient
    ``m`` and ``n``.
    """

    m: FloatK
    n: FloatK
    k: FloatK
    format: Format = "bf16"
    count: FloatK = 1.0
    product: GemmPass = "fwd"

    @property
    def flops(self) -> FloatK:
        """Floating-point operations of all products. [FLOP]"""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """Products of ``groups`` experts, ``rows`` token rows in all, in one kernel or one kernel each.

    ``wgrad`` marks the weight gradient, whose reduction runs over the rows of an expert.
    """

    rows: FloatK
    groups: FloatK
    n: FloatK
    k: FloatK
    format: Format = "bf16"
    wgrad: bool = False
    sequential: bool = False
    uneven: FloatK = 0.0
    """Standard deviation of the experts' rows over their mean. [-]"""
    kernel: GroupedKernel = "one"
    """Of products that are not sequential: ``one`` kernel for all, or ``multi-stream``: one each on several streams."""
    added_bytes: float = 0.0
    """What a weight gradient moves beyond one element, where its product adds it to the main one. [B]"""

    @property
    def flops(self) -> FloatK:
        """Floating-point operations of all experts' products. [FLOP]"""
        return 2.0 * self.rows * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention over ``batch`` sequences; ``pairs`` is the number of query-key pairs of one head and sequence.

    ``kv_heads`` 0 means as many as query heads; ``backend`` is the library that computes it: cuDNN, FlashAttention 2
    or the first FlashAttention in Triton.
    """

    batch: FloatK
    heads: FloatK
    q_len: FloatK
    pairs: FloatK
    d_qk: float
    d_v: float
    backward: bool = False
    kv_heads: FloatK = 0.0
    backend: Backend = "cudnn"
    masked_pairs: FloatK = 0.0
    """Pairs that the mask takes out and the backward kernel computes all the same."""

    def backward_work(self) -> Attention:
        """The work of its backward."""
        return replace(self, backward=True, pairs=self.pairs + self.masked_pairs)

    @property
    def groups(self) -> FloatK:
        """Key-value heads. [-]"""
        return where(self.kv_heads > 0, self.kv_heads, self.heads)

    @property
    def flops(self) -> FloatK:
        """Two products forward, five backward. [FLOP]"""
        product = 2.0 * self.batch * self.heads * self.pairs
        if self.backward:
            return product * (3.0 * self.d_qk + 2.0 * self.d_v)
        return product * (self.d_qk + self.d_v)


class MemoryBound(NamedTuple):
    """Memory-bound kernels that move ``bytes`` in all. [B]

    ``like`` names the measured op whose rate they reach, such as ``rmsnorm_fwd``, as eager or as compiled as the op is.
    It may name which of the two, such as ``compiled swiglu_fwd``; empty is the general rate. With ``elements`` in rows
    of ``width``, the measured op's full time is taken: what it costs a row and a column too. ``source`` are the bytes
    of rows that are read several times, in no order; what the L2 does not hold of them comes from memory again.
    ``parts`` are those of the bytes that kernels like other measured ops move.
    """

    bytes: FloatK
    like: str = ""
    elements: FloatK = 0.0
    width: FloatK = 0.0
    source: FloatK = 0.0
    parts: tuple[tuple[FloatK, str], ...] = ()


CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "deepep"]


class Collective(NamedTuple):
    """A collective over a process group; ``payload`` as :mod:`mofa.cost.kernels.collectives` defines it. [B]"""

    kind: CollectiveKind
    group: str
    payload: FloatK
    imbalance: FloatK = 1.0


class HostCopy(NamedTuple):
    """A copy of pinned memory between a GPU and its host, one way; copy engines move it. [B]"""

    bytes: FloatK


@dataclass(frozen=True, slots=True)
class HostSync:
    """The host waits for the device, and then computes for ``host_s`` before it issues anything more. [s]

    An op of it that reads tensors waits for those that other streams make alone, not for what is queued behind them.
    """

    host_s: FloatK = 0.0


Work = Gemm | GroupedGemm | Attention | MemoryBound | Collective | HostCopy | HostSync
PRODUCTS = (Gemm, GroupedGemm, Attention)
"""Work that the power limit slows down."""
