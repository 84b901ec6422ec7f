"""What Megatron-Core on Transformer Engine takes at a first use: workspaces, dummy gradients, fp8 copies, zeros.

When each is taken decides which hole of the allocator's it lies in for good, and so what is reserved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from mofa.blocks.context import ArrayK, Context
from mofa.blocks.elementwise import any_true, value_of_combination
from mofa.blocks.fp8 import copies_per_fp8_weight, fp8_weight_copies_bytes_per_param
from mofa.blocks.op import Op
from mofa.blocks.roles import Role
from mofa.blocks.work import Gemm, GroupedGemm

WORKSPACE = 32 * 2**20 + 1024
"""Of cuBLAS, that Transformer Engine hands to each of its products (2.20.2, cpp_extensions/gemm.py,
``get_cublas_workspace_size_bytes``): on Hopper and later; 4 MiB before, which is not told apart. [B]"""
GROUPED_STREAMS = 4
"""Such workspaces beside it for grouped products, one for each stream (``get_num_cublas_streams``). [-]"""
YARN_POSITIONS = 4096
"""Positions whose cosines and sines each layer of latent attention has from the start (megatron_core 0.16.1,
``original_max_position_embeddings``; yarn_rotary_pos_embedding.py). [tokens]"""
OUTSIDE_LAYERS = ("embedding", "head", "mtp")
"""Blocks whose products are not Transformer Engine's, or are not in fp8."""


NODE: Literal["node"] = "node"
FirstUse = tuple[str, Role | Literal["node"]]
"""An op of a block: the forward's that it is or differentiates, and its role; or where the node of autograd's begins
that differentiates it (:data:`NODE`)."""


class PersistentBuffer(NamedTuple):
    """A buffer that the first op of its ``name`` on a rank takes. [B]

    ``per_block``: every block has its own. ``after_outputs``: it comes behind the op's outputs, else in front of them.
    It ``stays`` for good, or ``begins`` with an op and ``ends`` with another one of its pass.
    """

    name: str
    bytes: int
    per_block: bool
    after_outputs: bool
    lifetime: Literal["stays", "begins", "ends"] = "stays"


def buffers_at_first_use(
    ctx: Context, block: str, ops: Iterable[Op], repeated: frozenset[str] = frozenset(), k: int = 0
) -> dict[FirstUse, tuple[PersistentBuffer, ...]]:
    """What ops of a block take at their first use; ``ops`` are its forward ones, ``repeated`` those that recompute.

    A dummy gradient comes behind the product that adds to the main gradient by itself, and behind the gradient of a
    norm that is one module with it (te/module/base.py, ``get_dummy_wgrad``; module/layernorm_linear.py;
    tensor_parallel/layers.py): one for each shape. fp8 copies of a weight come in front of its
    product (``get_weight_workspace``), where the parameter is not fp8 itself. The head's gathered input is a buffer of
    Megatron's (``get_global_memory_buffer``).

    The forward that makes these copies returns them beside its output (module/linear.py, ``new_weight_workspace``).
    Nothing gives them a gradient, and autograd makes zeros in its place, in bf16, until that linear's node ends
    (``set_materialize_grads``; h200-te1-nemo12b-5l-tensorwise-beginning). A forward that is recomputed finds copies,
    and experts' linears return none.
    """
    buffers: dict[FirstUse, tuple[PersistentBuffer, ...]] = {}
    norm = ""  # in front of the next linear, one module with it
    for op in ops:
        if op.back is not None and op.back.held_outputs:
            norm = op.name
        if not op.weight or any_true(op.weight_bytes):
            continue
        number = max(int(value_of_combination(op.num_weights, k)), 1)
        params = value_of_combination(op.weight_params, k) / number
        of_forward: list[PersistentBuffer] = []
        of_wgrad: list[PersistentBuffer] = []
        if ctx.fp8 is not None and block not in OUTSIDE_LAYERS and not ctx.framework.fp8_params:
            layouts = copies_per_fp8_weight(ctx.fp8.name, ctx.fp8_transposes)
            each = int(params * fp8_weight_copies_bytes_per_param(ctx.fp8.name, ctx.fp8_transposes) / layouts)
            of_forward += [
                PersistentBuffer(f"fp8 copy of {op.weight} {i}", each, per_block=True, after_outputs=False)
                for i in range(number * layouts)
            ]
            if isinstance(op.work, Gemm) and op.name not in repeated:
                begins = PersistentBuffer(f"zeros for {op.weight}", int(2 * params), True, False, "begins")
                buffers[op.name, NODE] = (begins,)
                ends = begins._replace(after_outputs=True, lifetime="ends")
                if ctx.framework.delay_wgrad:
                    buffers[op.name, "dgrad"] = (ends,)
                else:
                    of_wgrad.append(ends)
        if block == "head" and value_of_combination(ctx.gathers_sequence, k):
            gathered = int(value_of_combination(ctx.tokens, k) * ctx.model.hidden * ctx.activation_element_bytes)
            of_forward.append(
                PersistentBuffer("gathered input of the head", gathered, per_block=False, after_outputs=False)
            )
        if _in_streams(op):
            of_forward += [
                PersistentBuffer(f"workspace of grouped products {i}", WORKSPACE, per_block=False, after_outputs=True)
                for i in range(GROUPED_STREAMS)
            ]
        if of_forward:
            buffers[op.name, ""] = tuple(of_forward)
        if ctx.framework.fuses_wgrad_accumulation:
            rows, columns = (round(value_of_combination(width, k)) for width in product_weight_shape(op))
            name = f"dummy gradient of {rows} x {columns}"
            of_wgrad.insert(0, PersistentBuffer(name, int(2 * params), per_block=False, after_outputs=True))
        if of_wgrad:  # with a norm in front the module goes on with that before it makes the dummy
            buffers[(norm, "backward") if norm else (op.name, "wgrad")] = tuple(of_wgrad)
        norm = ""
    return buffers


def product_weight_shape(op: Op) -> tuple[ArrayK, ArrayK]:
    """Rows and columns of a product's weight, of one expert's where it has several. (K,) each [elements]"""
    assert isinstance(op.work, (Gemm, GroupedGemm)), op.name
    return op.work.n, op.work.k


def product_workspace_bytes(ops: Iterable[Op]) -> float:
    """Transformer Engine's for products, and those for grouped ones where ``ops`` have any. [B]"""
    return WORKSPACE * (1.0 + GROUPED_STREAMS * any(_in_streams(op) for op in ops))


def _in_streams(op: Op) -> bool:
    return isinstance(op.work, GroupedGemm) and not op.work.sequential


class RotaryTableBytes(NamedTuple):
    """Tables of rotations, each of a model chunk, or of a layer with latent attention. (K,) [B]

    ``from_start`` are there from the start, cosines and sines; ``table`` comes with the first forward.
    """

    from_start: tuple[int, ...]
    table: ArrayK
    of_layers: bool


def rotary_table_bytes(ctx: Context) -> RotaryTableBytes:
    """Bytes of the tables of rotations that stay.

    Of a rank's positions a table in fp32 is kept for good (rotary_pos_embedding.py, ``lru_cache``). Under YaRN each
    layer's attention has two more in bf16.
    """
    a = ctx.model.attention
    if ctx.model.positions != "rope":
        return RotaryTableBytes((), 0.0, of_layers=False)
    of_layers, width = ctx.model.attention_kind.megatron.rotates_by_yarn, int(a.d_rope)
    from_start = (2 * YARN_POSITIONS * width,) * 2 if of_layers else ()
    return RotaryTableBytes(from_start, 4.0 * ctx.seq_len * width / ctx.cp, of_layers=of_layers)
