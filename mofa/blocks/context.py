"""What the blocks of a tape are built for: one model under K combinations of degrees, on one framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from mofa.blocks.elementwise import BoolK, FloatK, logical_not, maximum, where
from mofa.blocks.float8 import Float8Linears
from mofa.blocks.fp8 import Fp8Recipe
from mofa.blocks.op import Tape, TapeBuilder
from mofa.blocks.roles import BlockRole
from mofa.blocks.work import Format
from mofa.specs.attention.mla import MlaSpec
from mofa.specs.attention.record import Heads
from mofa.specs.framework import FrameworkSpec
from mofa.specs.gpu_facts import LayerKernelRatios, load_unmeasured_gpu_facts
from mofa.specs.model import ModelSpec

ArrayK = FloatK
"""An entry for each of the K combinations, or the plain number where there is one. (K,)"""


@dataclass(frozen=True)
class Context:
    """One model, one framework, K combinations of degrees; an array has shape (K,), one combination is plain numbers.

    ``rows_time`` are the token rows that the slowest rank's experts receive in one layer and micro-batch, all of its
    tensor-parallel expert group together. ``rows_memory`` are those of the quantile that memory must hold.
    ``imbalance`` is the bytes of the slowest rank's all-to-all over the mean. ``fsdp`` and ``efsdp`` are the ranks that
    share a dense and an expert parameter, 1 without sharding.
    """

    model: ModelSpec
    framework: FrameworkSpec
    gemm_format: Format
    seq_len: int
    tp: ArrayK
    sp: BoolK
    cp: ArrayK
    cp_ring: BoolK
    ep: ArrayK
    etp: ArrayK
    micro_batch: ArrayK
    fsdp: ArrayK
    efsdp: ArrayK
    rows_time: ArrayK
    rows_memory: ArrayK
    imbalance: ArrayK
    expert_rows_deviation: ArrayK = 0.0
    """Standard deviation of the rows of a rank's experts over their mean. [-]"""
    fixed_rows: bool = False
    """Whether every expert gets its capacity of rows, so that no host asks how many there are."""
    capacity_factor: float | None = None
    """An expert's most rows over an even share, beyond which tokens are dropped; None drops none. [-]"""
    schedules_replicas: BoolK = False
    """Where the tokens of merged expert-parallel groups are scheduled over replicas (MicroMoE)."""
    unseen_rows_share: ArrayK = 0.0
    """Share of an expert's numbers of tokens for which the library of products remembers no kernel. [-]"""
    cp_a2a: BoolK = False
    """Where attention's heads are exchanged for tokens."""
    expected_first_use_kernels: ArrayK = 0.0
    """Kernels that are loaded for an expert's number of tokens, of all its products. [-]"""
    has_all_layers: BoolK = True
    """Where a rank has all layers, in no pipeline."""
    mean_loops_before: ArrayK = 1.0
    """Loops over experts that a pass has been through at the end of each, in the mean over its layers. [-]"""
    schedule_s: ArrayK = 0.0
    """Host time of scheduling one layer and micro-batch. [s]"""
    accumulates: FloatK = 1.0
    """Share of a step's micro-batches whose gradients are added to those of earlier ones. [-]"""
    accumulating: bool = True
    """More than one micro-batch per step."""
    pipelined: bool = False
    fp8: Fp8Recipe | None = None
    """How the layers' products are scaled, where they are in fp8."""
    float8: Float8Linears | None = None
    """torchtitan: the linears that torchao runs in fp8."""
    fp8_transposes: bool = True
    """Whether fp8 products of one scale a tensor read both operands with the summed dimension innermost."""
    kernels: LayerKernelRatios = field(default_factory=lambda: load_unmeasured_gpu_facts().layer_kernels)
    """Of the GPU: kernels over measured ones that they are like."""
    activation_element_bytes: int = 2
    """Bytes of an activation element that GEMMs read. [B]"""
    residual_element_bytes: int = 2
    """Bytes of an element of the residual stream. [B]"""
    weight_element_bytes: int = 2
    """Bytes of a parameter element that GEMMs read. [B]"""
    precision_mode: Literal["mixed", "autocast", "uniform"] = "mixed"
    """torchtitan: FSDP2's mixed precision, autocast (one GPU, DDP) of fp32 parameters, or everything in the training
    dtype (TP, PP, bf16 parameters under autocast)."""
    stored_bytes_per_param: float = 4.0
    """torchtitan: bytes of a parameter as FSDP's shards hold it, and of its reduced gradient. [B]"""
    has_amp_casts: bool = False
    """torchtitan: whether torch.autocast runs; of bf16 parameters only a product in fp32 has something to cast."""

    @cached_property
    def tokens(self) -> ArrayK:
        """Tokens of one micro-batch on one rank, before sequence parallelism splits them. [tokens]"""
        return self.micro_batch * self.seq_len / self.cp

    @cached_property
    def shard_tokens(self) -> ArrayK:
        """Tokens outside the tensor-parallel regions. [tokens]"""
        return where(self.sp, self.tokens / self.tp, self.tokens)

    @cached_property
    def has_tp(self) -> BoolK:
        """Where ranks share matrices by tensor parallelism."""
        return self.tp > 1

    @cached_property
    def gathers_sequence(self) -> BoolK:
        """Where sequence parallelism gathers before and scatters after a tensor-parallel region."""
        return (self.tp > 1) & self.sp

    @cached_property
    def all_reduces_over_tp(self) -> BoolK:
        """Where tensor parallelism without sequence parallelism all-reduces."""
        return (self.tp > 1) & logical_not(self.sp)

    @cached_property
    def heads(self) -> ArrayK:
        """Query heads of one rank."""
        return self.model.attention.num_heads / self.tp

    @cached_property
    def kv_heads(self) -> ArrayK:
        """Key-value heads of one rank; held in copies where there are fewer than tp."""
        return maximum(self.model.attention.num_kv_heads / self.tp, 1.0)

    @cached_property
    def local_experts(self) -> ArrayK:
        """Experts that a rank holds of a layer."""
        assert self.model.moe is not None
        return self.model.moe.num_experts / self.ep

    def attention_pairs(self, windowed: bool) -> ArrayK:
        """Query-key pairs of one head and sequence on one rank, causal, under cp balanced over ranks."""
        return self.model.attended_pairs(self.seq_len, windowed) / self.cp


@dataclass(frozen=True)
class Primitives:
    """What one framework really launches, keeps and sends for each step of a block: one set a framework.

    Every function appends to the builder and returns the names of its outputs.
    """

    norm: Callable[[TapeBuilder, Context, str, str, float], str]
    """(builder, context, input, name, width) -> normalised input"""
    qkv: Callable[[TapeBuilder, Context, str], Heads]
    head_norm: Callable[[TapeBuilder, Context, str, str, ArrayK, float], str]
    """(builder, context, input, name, heads, head_dim) -> normalised heads"""
    rope: Callable[[TapeBuilder, Context, str, str], tuple[str, str]]
    mla: Callable[[TapeBuilder, Context, MlaSpec, str], Heads]
    """The low-rank projections of latent attention: (builder, context, sizes, input) -> q, k, v"""
    attend: Callable[[TapeBuilder, Context, str, str, str, bool], str]
    """(builder, context, q, k, v, windowed) -> output"""
    row_linear: Callable[[TapeBuilder, Context, str, str, float, ArrayK], str]
    """(builder, context, input, name, width out, width in per rank) -> reduced output"""
    residual: Callable[[TapeBuilder, Context, str, str, str], str]
    """(builder, context, residual stream, branch, name) -> sum"""
    mlp: Callable[[TapeBuilder, Context, str, str, float], str]
    """(builder, context, input, name, width) -> reduced output"""
    moe: Callable[[TapeBuilder, Context, str], str]
    """(builder, context, normalised input) -> output of routed and shared experts"""
    embedding: Callable[[TapeBuilder, Context], str]
    head: Callable[[TapeBuilder, Context, str], str]
    """(builder, context, residual stream) -> loss: final norm, output layer, cross entropy"""
    begin_block: Callable[[TapeBuilder, Context, BlockRole, ArrayK, ArrayK], None]
    """(builder, context, block, dense params per rank, expert params per rank): what data parallelism does before it"""
    wrap_backward: Callable[[Tape, Context, BlockRole, ArrayK, ArrayK], Tape] | None = None
    """(backward tape, context, block, dense params per rank, expert params per rank): what data parallelism adds to it;
    the block is a kind of layer, ``embedding`` or ``head``"""
