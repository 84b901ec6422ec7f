"""Transformer Engine's fp8 recipes: what each casts, keeps, gathers and multiplies with, as a record of traits.

Read in Transformer Engine 2.20.2 (``te``: pytorch/; ``csrc``: its extension) and Megatron-Core 0.16.1. All layers'
linears are in fp8, the first and the last too: ``first_last_layers_bf16`` is off by default, and delayed scaling
refuses it (transformer_config.py). Embedding, head, router, norms' arithmetic and attention (``fp8_dpa`` off) are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mofa.blocks.float8 import RECIPES
from mofa.blocks.work import BACK_FORMATS, Format
from mofa.specs.framework import FrameworkSpec
from mofa.specs.workload import WorkloadSpec

BLOCK = 128.0
"""Elements that share a scale under blockwise scaling, along a row or a column; of weights a square of them. [-]"""
MX_BLOCK = 32.0
"""Elements that share a scale of a byte (E8M0) under MXFP8, along a row or a column, of weights too (te/constants.py,
``MXFP8_BLOCK_SCALING_SIZE``). [-]"""
SCALE_BYTES = 4.0
"""Of a scale, fp32. [B]"""
TENSORS_PER_CAST = 64.0
"""Tensors that one launch of delayed scaling's cast of several takes (common/transpose/multi_cast_transpose.cu,
``kMaxTensorsPerKernel``). [-]"""


@dataclass(frozen=True)
class Fp8Recipe:
    """How one recipe treats a linear layer's operands.

    A copy is *row-wise* as the tensor lies, or *column-wise*, transposed: products with one scale a tensor, on GPUs
    that want the summed dimension innermost, and all products of blocks read one of each.
    """

    name: Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
    product: Format
    """Kind of the forward's product; the backward's follow from it (:data:`mofa.blocks.work.BACK_FORMATS`)."""
    row_cast: str
    """Measured op of a cast to the row-wise copy alone; with the search for the largest where that is a kernel."""
    row_and_column_cast: str
    """To both copies."""
    column_cast: str
    """To the column-wise copy alone, where the input was kept in bf16; to both where there is no other."""
    weight_cast: str
    main_param_cast: str
    """Of a shard of main parameters, from its bf16 copy, where the parameters are fp8."""
    main_param_amax_bytes: float
    """Read per element of the shard to find the largest in a kernel of its own. [B]"""
    amax_bytes: float
    """Read per element to find the largest in a kernel of its own. [B]"""
    kernels_per_cast: int
    """Kernels of a cast: the largest, the scale of it, the cast. [-]"""
    scale_bytes: float
    """Of scales that are kept, per element of a copy. [B]"""
    gathers_row_copy_only: bool
    """Under sequence parallelism the row-wise copy is kept, gathered and then transposed (te/distributed.py,
    ``_all_gather_fp8``); else each copy is gathered in its turn, the column-wise one into a buffer from which it is put
    in order (``_start_all_gather_fp8_blockwise``)."""
    reduces_amax: bool
    """Whether the largest of a shard is reduced over the tensor-parallel group before the cast (csrc/quantizer.cpp,
    ``Float8CurrentScalingQuantizer::quantize_impl``)."""
    norm: Literal["casts", "finds amax", "bf16"]
    """What the norm in front of a linear does of its cast (csrc/extensions/normalization.cpp, ``rmsnorm_fwd``)."""
    keeps_inputs: bool
    """Whether linears keep a bf16 input that is kept by another op anyway, and cast it again backward
    (``set_save_original_input`` in Megatron's attention.py, multi_latent_attention.py and moe/shared_experts.py)."""
    casts_experts_together: bool
    """One launch for the casts of many experts (csrc/extensions/cast.cpp, ``multi_tensor_quantize_impl``)."""
    enters_context_each_layer: bool
    """Whether Megatron enters TE's context around each layer; around a whole pass under delayed scaling, whose
    context reduces maxima on leaving (transformer_block.py, ``use_inner_quantization_context``)."""
    casts_ragged_blocks_slower: bool = False
    """Whether a cast of rows that a block does not divide runs another kernel (``ragged_block_cast`` of the GPU's
    ``layer_kernels``)."""
    aligned_rows: float = 16.0
    """Rows of an expert's input are padded to a multiple of this (te/quantization.py,
    ``get_align_size_for_quantization``; megatron's fp8_utils.py, ``get_fp8_align_size``). [tokens]"""
    row_multiple: int = 8
    """What an operand's rows must be a multiple of (te/utils.py, ``assert_dim_for_fp8_exec``;
    te/tensor/mxfp8_tensor.py, ``is_quantizable``). [tokens]"""
    column_multiple: int = 16
    """And its columns, likewise. [elements]"""
    transposes_columns: bool = True
    """Whether a column-wise copy lies transposed, so that gathered ones have to be put in order; else its scales alone
    go along columns (te/tensor/mxfp8_tensor.py, ``get_columnwise_shape``)."""
    weight_scale_bytes: float = 0.0
    """Of a weight's scales, per element of a copy; those of squares of 128 are left out. [B]"""
    gathers_params_in_bf16: bool = False
    """Whether fp8 parameters come over data parallelism in bf16, into the buffer of the gradients, and each rank casts
    them for itself (megatron's param_and_grad_buffer.py, ``shared_buffer`` and ``finish_param_sync``): scales of rows
    and of columns need the values, not one another's casts."""
    min_cuda_version: str = ""
    """Release of CUDA below which Transformer Engine refuses it (te/quantization.py,
    ``_compute_fp8_block_scaling_support``); empty where any has it."""

    def cast_moved_bytes_per_element(self, copies: int) -> float:
        """Moved by a cast to one or two copies, per element: read in bf16, once more for the largest. [B]

        Examples
        --------
        >>> [FP8_RECIPES[name].cast_moved_bytes_per_element(2) for name in ("delayed", "tensorwise")]
        [4.0, 6.0]
        """
        return 2.0 + self.amax_bytes + copies * 1.0

    def copy_bytes_per_element(self) -> float:
        """Held by a copy per element, with its scales. [B]

        Examples
        --------
        >>> [FP8_RECIPES[name].copy_bytes_per_element() for name in ("tensorwise", "blockwise")]
        [1.0, 1.03125]
        """
        return 1.0 + self.scale_bytes

    @property
    def mean_padding_rows_per_expert(self) -> float:
        """That it takes to fill up an expert's rows of any number, in the mean. [tokens]"""
        return (self.aligned_rows - 1.0) / 2.0


FP8_RECIPES: dict[str, Fp8Recipe] = {
    "delayed": Fp8Recipe(
        "delayed", "fp8_fast", "fp8_cast_delayed", "fp8_cast_both_delayed", "fp8_cast_both_delayed",
        "fp8_cast_both_delayed", "fp8_cast_main", main_param_amax_bytes=0.0, amax_bytes=0.0, kernels_per_cast=1,
        scale_bytes=0.0,
        gathers_row_copy_only=True, reduces_amax=False, norm="casts", keeps_inputs=False, casts_experts_together=True,
        enters_context_each_layer=False,
    ),
    "tensorwise": Fp8Recipe(
        "tensorwise", "fp8_fast", "fp8_cast_tensorwise", "fp8_cast_both_tensorwise", "fp8_cast_both_tensorwise",
        "fp8_cast_both_tensorwise", "fp8_cast_main", main_param_amax_bytes=2.0, amax_bytes=2.0, kernels_per_cast=4,
        scale_bytes=0.0,
        gathers_row_copy_only=True, reduces_amax=True, norm="finds amax", keeps_inputs=True,
        casts_experts_together=False,
        enters_context_each_layer=True,
    ),
    "blockwise": Fp8Recipe(
        "blockwise", "fp8_block", "fp8_cast_block", "fp8_cast_both_block", "fp8_cast_column_block",
        "fp8_cast_weight_block", "fp8_cast_block", main_param_amax_bytes=2.0, amax_bytes=0.0, kernels_per_cast=1,
        scale_bytes=SCALE_BYTES / BLOCK, gathers_row_copy_only=False, reduces_amax=False, norm="bf16",
        keeps_inputs=True,
        casts_experts_together=False, enters_context_each_layer=True, casts_ragged_blocks_slower=True,
        min_cuda_version="12.9",
    ),
    "mxfp8": Fp8Recipe(
        "mxfp8", "mxfp8", "fp8_cast_block", "fp8_cast_both_block", "fp8_cast_column_block", "fp8_cast_both_block",
        "fp8_cast_block", main_param_amax_bytes=0.0, amax_bytes=0.0, kernels_per_cast=1, scale_bytes=1.0 / MX_BLOCK,
        gathers_row_copy_only=False, reduces_amax=False, norm="bf16", keeps_inputs=True,
        casts_experts_together=False, enters_context_each_layer=True,
        aligned_rows=32.0, row_multiple=32, column_multiple=32, transposes_columns=False,
        weight_scale_bytes=1.0 / MX_BLOCK, gathers_params_in_bf16=True,
    ),
}  # fmt: skip
"""By Megatron-Core's name (``fp8_recipe``). Delayed scaling finds a tensor's largest while it casts by an older one, in
one kernel. Current scaling looks for it first: a memset, the search, the scale, the cast (``quantize_impl``). Blocks
find theirs in the cast's kernel. Casts of MXFP8 were not timed: those of 1 x 128 blocks, which read and write as much,
stand in (docs/published.md)."""


def transformer_engine_recipe(workload: WorkloadSpec, framework: FrameworkSpec) -> str:
    """How Transformer Engine scales a job's fp8 products; empty in bf16, or where another library scales them.

    Examples
    --------
    >>> import mofa
    >>> job = mofa.load_workload("llama3-8b")
    >>> fp8 = job.model_copy(update={"precision": job.precision.model_copy(update={"gemm": "fp8-tensorwise"})})
    >>> [transformer_engine_recipe(fp8, mofa.load_framework(name)) for name in ("megatron", "torchtitan")]
    ['tensorwise', '']
    """
    return workload.precision.fp8_recipe if framework.library else ""


def fp8_recipe_of_layers(workload: WorkloadSpec, framework: FrameworkSpec) -> str:
    """How Transformer Engine's linears scale in a framework's layers; of fsdp1 they stand among PyTorch's own modules.

    Examples
    --------
    >>> import mofa
    >>> job = mofa.load_workload("llama3-8b")
    >>> fp8 = job.model_copy(update={"precision": job.precision.model_copy(update={"gemm": "fp8-delayed"})})
    >>> [fp8_recipe_of_layers(fp8, mofa.load_framework(name)) for name in ("megatron", "fsdp1", "torchtitan")]
    ['delayed', 'delayed', '']
    """
    return "" if framework.traits.has_torchao else workload.precision.fp8_recipe


def copies_per_fp8_weight(recipe: str, transposes: bool) -> int:
    """Copies that fp8 products read of each weight: one is both where products of one scale a tensor take any layout.
    Scales of weights, one for 128 x 128, are left out. [-]

    Examples
    --------
    >>> copies_per_fp8_weight("delayed", True), copies_per_fp8_weight("delayed", False)
    (2, 1)
    >>> copies_per_fp8_weight("blockwise", False)
    2
    """
    return 1 + (transposes or not FP8_RECIPES[recipe].gathers_row_copy_only)


def fp8_weight_copies_bytes_per_param(recipe: str, transposes: bool) -> float:
    """Held by all copies that fp8 products read of a weight, per parameter. [B]

    Examples
    --------
    >>> [fp8_weight_copies_bytes_per_param(recipe, False) for recipe in ("tensorwise", "blockwise", "mxfp8")]
    [1.0, 2.0, 2.0625]
    """
    return copies_per_fp8_weight(recipe, transposes) * (1.0 + FP8_RECIPES[recipe].weight_scale_bytes)


def formats_of_layer_products(recipe: str) -> tuple[Format, ...]:
    """Kinds of the products of a layer in a recipe of either library, or in bf16 without one.

    Examples
    --------
    >>> formats_of_layer_products(""), formats_of_layer_products("blockwise")
    (('bf16',), ('fp8_block', 'fp8_block_rows'))
    """
    product: Format = "bf16"
    if recipe:
        product = FP8_RECIPES[recipe].product if recipe in FP8_RECIPES else RECIPES[recipe].product
    return tuple(dict.fromkeys((product, *BACK_FORMATS.get(product, ()))))
