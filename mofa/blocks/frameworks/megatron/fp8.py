"""Linear layers in fp8 as Transformer Engine runs them: casts, what is kept, gathers, transposes.

Read in Transformer Engine 2.20.2, module/linear.py (``_linear_forward_impl``, ``_linear_backward_impl``),
module/layernorm_linear.py, module/grouped_linear.py and module/base.py (``grad_output_preprocess``). The input is cast
before the product; forward reads its row-wise copy, and the column-wise one is kept. The output's gradient is cast to
both: the product for the input reads rows, that for the weight columns. Weights' copies are made in the first
micro-batch of a step and stay (``quantize_weight``): they are no part of a layer's tape.
"""

from __future__ import annotations

from typing import NamedTuple

from mofa.blocks.context import Context
from mofa.blocks.elementwise import BoolK, all_true, any_true, ceil, logical_not, where
from mofa.blocks.fp8 import BLOCK, TENSORS_PER_CAST, Fp8Recipe
from mofa.blocks.frameworks.megatron.calls import timed_module_call
from mofa.blocks.frameworks.megatron.expert_capacity import fills_last_pieces, rows_of_whole_pieces
from mofa.blocks.frameworks.megatron.tuned_norms import has_tuned_norm
from mofa.blocks.op import (
    GRADIENT,
    WRITES,
    BackwardPreparation,
    FloatK,
    Op,
    OpBackward,
    ScratchSequence,
    TapeBuilder,
)
from mofa.blocks.recomputation import is_in_region
from mofa.blocks.work import Collective, MemoryBound

VIEW = OpBackward(0.0, 0)
AMAX_BYTES = 4.0
"""Of a tensor's largest, which is reduced over the ranks that hold its shards. [B]"""


class Fp8Input(NamedTuple):
    """An input in fp8: what the forward product reads, what is kept of it, and what is made of that backward."""

    row: str
    saves: tuple[str, ...]
    before_dgrad: tuple[Op, ...] = ()
    after_dgrad: tuple[Op, ...] = ()
    input: str = ""


class Fp8OutputGradient(NamedTuple):
    """An output's gradient in fp8: ops on it, and the copies that the two products read."""

    ops: tuple[Op, ...]
    dgrad: str
    wgrad: str
    after_dgrad: tuple[Op, ...] = ()


def prepare_linear_backward(operand: Fp8Input, received: Fp8OutputGradient) -> BackwardPreparation:
    """What a linear layer's backward does before its products."""
    after_dgrad = (*operand.after_dgrad, *received.after_dgrad)
    return BackwardPreparation(
        received.ops, received.dgrad, received.wgrad, operand.before_dgrad, after_dgrad, operand.input
    )


def fp8_recipe_of(ctx: Context) -> Fp8Recipe:
    """The recipe of a context that has one."""
    assert ctx.fp8 is not None
    return ctx.fp8


class _NormInFront(NamedTuple):
    """What a norm that is one module with a linear layer did of its cast."""

    does: str = "bf16"
    """As :attr:`Fp8Recipe.norm`."""
    temporary: FloatK | None = None
    """Its output in bf16, which it allocates behind the copies that it is cast to, and frees itself; None of a norm
    that has none, or where there is no norm (csrc/extensions/normalization.cpp, ``unquantized_out``). [B]"""


NO_NORM = _NormInFront()


def _one_copy(ctx: Context) -> bool:
    """Where products with one scale a tensor take any layout, one copy is both."""
    return fp8_recipe_of(ctx).gathers_row_copy_only and not ctx.fp8_transposes


def cast_input_to_fp8(
    b: TapeBuilder, ctx: Context, x: str, name: str, elements: FloatK, *, moved: FloatK | None = None,
    gathered: FloatK | None = None, experts: FloatK = 1.0, kept_anyway: bool = False,
) -> Fp8Input:  # fmt: skip
    """Cast a linear layer's input.

    Parameters
    ----------
    elements, moved
        That are held, and that the kernels pass over where routing is uneven. [elements]
    gathered
        Of the input as sequence parallelism gathers it; None of a layer that never does. [elements]
    experts
        Tensors that are cast each by itself. [-]
    kept_anyway
        Whether another op keeps the input in bf16, which recipes that can cast it again then rely on.
    """
    recipe, moved = fp8_recipe_of(ctx), elements if moved is None else moved
    gathers, gathered = _where_gathered(ctx, gathered)
    again = kept_anyway and recipe.keeps_inputs
    sources = (x, *_reduced_amax(b, ctx, x, name, gathers))
    norm = NO_NORM if again else _norm_in_front(b, ctx, recipe, x)
    row = b.tensor(f"{name}.fp8", _copy_bytes(recipe, elements), grad_bytes=elements * ctx.activation_element_bytes)
    if again:
        _add(b, _cast(f"{name}.cast", recipe, sources, (row,), moved, True, experts, norm))
        return _cast_again(b, ctx, recipe, x, name, row, elements, gathered, gathers)
    if _one_copy(ctx):
        _add(b, _cast(f"{name}.cast", recipe, sources, (row,), moved, True, experts, norm))
        regathered, ops = _gathered(b, ctx, recipe, row, f"{name}.again", gathered, gathers)
        return Fp8Input(row, (row,), ops, (), regathered)
    alone = recipe.gathers_row_copy_only
    cast_alone = _rows_alone(recipe, gathers)
    column = b.tensor(f"{name}.fp8_t", _copy_bytes(recipe, where(cast_alone, 0.0, elements)), grad=False)
    if not alone or gathers is False:
        _add(b, _cast(f"{name}.cast", recipe, sources, (row, column), moved, cast_alone, experts, norm))
        if gathers is False:
            return Fp8Input(row, (column,))
        interleaved, ops = _gathered(b, ctx, recipe, column, f"{name}.again", gathered, gathers, columns=True)
        full, after_dgrad = _in_order(b, recipe, column, interleaved, f"{name}.again", gathered, gathers)
        return Fp8Input(row, (column,), ops, after_dgrad, full)
    # of candidates that gather the row-wise shard is kept, of the others the transposed copy
    shard = b.tensor(f"{name}.fp8_shard", _copy_bytes(recipe, where(gathers, elements, 0.0)), grad=False)
    b.tensors[row] = b.tensors[row]._replace(bytes=_copy_bytes(recipe, where(gathers, 0.0, elements)))
    _add(b, _cast(f"{name}.cast", recipe, sources, (row, shard, column), moved, cast_alone, experts, norm))
    full, ops = _gathered(b, ctx, recipe, shard, f"{name}.again", gathered, gathers)
    turned, after_dgrad = _transposed(b, column, full, shard, f"{name}.again", gathered, gathers)
    return Fp8Input(row, (shard, column), ops, after_dgrad, turned)


def _cast_again(
    b: TapeBuilder, ctx: Context, recipe: Fp8Recipe, x: str, name: str, row: str, elements: FloatK, gathered: FloatK,
    gathers: BoolK,
) -> Fp8Input:  # fmt: skip
    """An input that is kept in bf16 and cast once more backward: to columns, or to rows that are gathered."""
    alone = recipe.gathers_row_copy_only
    rows = b.tensor(f"{name}.again.fp8", _copy_bytes(recipe, elements if alone else 0.0), grad=False)
    column_elements = where(_rows_alone(recipe, gathers), 0.0, 0.0 if _one_copy(ctx) else elements)
    column = b.tensor(f"{name}.again.fp8_t", _copy_bytes(recipe, column_elements), grad=False)
    copies = where(_rows_alone(recipe, gathers), 1.0, 1.0 if _one_copy(ctx) or not alone else 2.0)
    like = recipe.column_cast
    moved = MemoryBound(recipe.cast_moved_bytes_per_element(0) * elements + copies * elements, like)
    cast = Op(f"{name}.again.cast", "memory_bound", moved, (x,), (rows, column), launches=recipe.kernels_per_cast)
    if gathers is False:
        return Fp8Input(row, (x,), (cast,), (), rows if _one_copy(ctx) else column)
    source = rows if alone else column
    full, ops = _gathered(b, ctx, recipe, source, f"{name}.again", gathered, gathers)
    if _one_copy(ctx):
        return Fp8Input(row, (x,), (cast, *ops), (), full)
    turn = _transposed(b, column, full, source, f"{name}.again", gathered, gathers)
    if not alone:
        turn = _in_order(b, recipe, column, full, f"{name}.again", gathered, gathers)
    return Fp8Input(row, (x,), (cast, *ops), turn[1], turn[0])


def cast_output_gradient_to_fp8(
    b: TapeBuilder, ctx: Context, name: str, elements: FloatK, *, moved: FloatK | None = None,
    gathered: FloatK | None = None, experts: FloatK = 1.0,
) -> Fp8OutputGradient:  # fmt: skip
    """Cast a linear layer's output gradient, and gather it behind a row-parallel layer (``gathered`` elements)."""
    recipe, moved = fp8_recipe_of(ctx), elements if moved is None else moved
    gathers, gathered = _where_gathered(ctx, gathered)
    base = f"{name}.dy"
    sources: tuple[str, ...] = (GRADIENT,)
    before: tuple[Op, ...] = ()
    if recipe.reduces_amax and gathers is not False:
        amax = b.tensor(f"{base}.amax", AMAX_BYTES, grad=False)
        before = (_reduce_amax(ctx, base, GRADIENT, amax, gathers),)
        sources = (GRADIENT, amax)
    row = b.tensor(f"{base}.fp8", _copy_bytes(recipe, elements), grad=False)
    if _one_copy(ctx):
        cast = _cast(f"{base}.cast", recipe, sources, (row,), moved, True, experts)
        full, ops = _gathered(b, ctx, recipe, row, base, gathered, gathers)
        return Fp8OutputGradient((*before, *cast, *ops), full, full)
    alone = _rows_alone(recipe, gathers)
    column = b.tensor(f"{base}.fp8_t", _copy_bytes(recipe, where(alone, 0.0, elements)), grad=False)
    cast = _cast(f"{base}.cast", recipe, sources, (row, column), moved, alone, experts)
    if gathers is False:
        return Fp8OutputGradient(cast, row, column)
    full, ops = _gathered(b, ctx, recipe, row, base, gathered, gathers)
    if recipe.gathers_row_copy_only:
        turned, turn = _transposed(b, column, full, row, base, gathered, gathers)
        if ctx.framework.tp_overlap:  # user buffers hold one copy, which is transposed behind the product
            return Fp8OutputGradient((*before, *cast, *ops), full, turned, turn)
        return Fp8OutputGradient((*before, *cast, *ops, *turn), full, turned)
    _shelve(b, recipe, row, gathers)
    _shelve(b, recipe, column, gathers)
    interleaved, columns = _gathered(b, ctx, recipe, column, f"{base}.columns", gathered, gathers, columns=True)
    ordered, order = _in_order(b, recipe, column, interleaved, base, gathered, gathers)
    return Fp8OutputGradient((*before, *cast, *ops, *columns, *order), full, ordered)


def _where_gathered(ctx: Context, elements: FloatK | None) -> tuple[BoolK, FloatK]:
    """Where a tensor's shards are gathered, False if nowhere, and how many elements they make together."""
    if elements is None or not any_true(ctx.gathers_sequence):
        return False, 0.0
    return ctx.gathers_sequence, elements


def gather_fp8_input(b: TapeBuilder, ctx: Context, row: str, name: str, elements: FloatK) -> str:
    """All-gather of the row-wise copies in front of a column-parallel layer; the gradient is reduced in bf16."""
    recipe = fp8_recipe_of(ctx)
    _shelve(b, recipe, row, ctx.gathers_sequence)
    out = b.tensor(f"{name}.full", _copy_bytes(recipe, elements), grad_bytes=elements * ctx.activation_element_bytes)
    reduced = Collective("reduce_scatter", "tp", elements * ctx.activation_element_bytes)
    back = OpBackward(work=reduced, family="tp", present=ctx.gathers_sequence, stream="tp")
    work = Collective("all_gather", "tp", _copy_bytes(recipe, elements))
    op = Op(f"{name}.all_gather", "tp", work, (row,), (out,), present=ctx.gathers_sequence, stream="tp", back=back)
    return b.add(op)


def padded_expert_rows(ctx: Context, rows: FloatK) -> FloatK:
    """Rows of a rank's experts with what fills each up to whole pieces: half a piece less a half on average. [tokens]

    Examples
    --------
    ``Fp8Padding`` (te/module/fp8_padding.py) rounds each expert's rows up to 16, by 7.5 in the mean, and to 32 under
    MXFP8.
    """
    if ctx.fixed_rows:
        return rows_of_whole_pieces(ctx, rows)
    return rows + where(rows > 0, fp8_recipe_of(ctx).mean_padding_rows_per_expert * ctx.local_experts, 0.0)


def pad_expert_rows(b: TapeBuilder, ctx: Context, x: str, rows: FloatK, memory_rows: FloatK) -> str:
    """A copy of the experts' rows with rows of zeros between them, and back of the gradient without them.

    ``TEGroupedMLP.forward`` pads all counts that are no multiples already: by chance few are, and all where the
    router's map is padded (``router_padding``). It pads the rows' probabilities too, whose bytes are left out here.
    """
    hidden = float(ctx.model.hidden)
    out = b.tensor("experts.padded", padded_expert_rows(ctx, memory_rows) * hidden * ctx.activation_element_bytes)
    moved = 2.0 * padded_expert_rows(ctx, rows) * hidden * ctx.activation_element_bytes
    back = OpBackward(2.0 * rows * hidden * ctx.activation_element_bytes, 1, like="copy")
    by = timed_module_call(ctx, "fp8_padding", ctx.local_experts, times=2.0)
    return b.add(Op("experts.pad", "memory_bound", MemoryBound(moved, "copy"), (x,), (out,), back=back, module_call=by,
                    present=fills_last_pieces(ctx, rows)))  # fmt: skip


def unpad_expert_rows(b: TapeBuilder, ctx: Context, x: str, rows: FloatK, memory_rows: FloatK) -> str:
    """The experts' results without the rows that filled them up."""
    hidden = float(ctx.model.hidden)
    out = b.tensor("experts.unpadded", memory_rows * hidden * ctx.activation_element_bytes)
    moved = 2.0 * rows * hidden * ctx.activation_element_bytes
    back = OpBackward(2.0 * padded_expert_rows(ctx, rows) * hidden * ctx.activation_element_bytes, 1, like="copy")
    by = timed_module_call(ctx, "fp8_padding", ctx.local_experts)
    return b.add(
        Op(
            "experts.unpad",
            "memory_bound",
            MemoryBound(moved, "copy"),
            (x,),
            (out,),
            back=back,
            module_call=by,
            present=fills_last_pieces(ctx, rows),
        )
    )


def grouped_product_input(
    b: TapeBuilder, ctx: Context, x: str, name: str, rows: tuple[FloatK, FloatK], inner: FloatK, out: FloatK
) -> tuple[str, tuple[str, ...], BackwardPreparation | None]:
    """A grouped product's input, in fp8 where products are, what of it is kept, and what its backward makes first.

    ``rows`` are those that the slowest rank's kernels pass over, and those that are held.
    """
    if ctx.fp8 is None:
        return x, (x,), None
    moved, memory_rows = rows
    passes = moved
    if ctx.fp8.casts_ragged_blocks_slower:  # an expert's padded rows seldom fill its last block
        passes = moved * (1.0 + (1.0 - ctx.fp8.aligned_rows / BLOCK) * (ctx.kernels.ragged_block_cast.value - 1.0))
    operand = cast_input_to_fp8(b, ctx, x, name, memory_rows * inner, moved=passes * inner, experts=ctx.local_experts)
    received = cast_output_gradient_to_fp8(
        b, ctx, name, memory_rows * out, moved=passes * out, experts=ctx.local_experts
    )
    return operand.row, operand.saves, prepare_linear_backward(operand, received)


def _copy_bytes(recipe: Fp8Recipe, elements: FloatK) -> FloatK:
    return elements * recipe.copy_bytes_per_element()


def _rows_alone(recipe: Fp8Recipe, gathers: BoolK) -> BoolK:
    """Where a cast makes no column-wise copy, because rows are gathered and transposed then."""
    return gathers if recipe.gathers_row_copy_only else False


def _cast(
    name: str, recipe: Fp8Recipe, reads: tuple[str, ...], writes: tuple[str, ...], moved: FloatK, alone: BoolK,
    experts: FloatK, norm: _NormInFront = NO_NORM,
) -> tuple[Op, ...]:  # fmt: skip
    """A cast, to rows ``alone`` or to both copies, which is another kernel: an op each where candidates differ.

    Of a norm in front the output in bf16 is allocated behind the copies that it is cast to, and freed at once.
    """
    scratch: FloatK = 0.0
    order = None
    if norm.temporary is not None:
        scratch = norm.temporary
        order = ScratchSequence((scratch,), (*(WRITES + n for n in range(len(writes))), 0, ~0))
    copies = where(alone, 1.0, 2.0)
    if norm.does == "casts":  # all that is left is to transpose
        work = MemoryBound(2.0 * (copies - 1.0) * moved, "fp8_transpose")
        return (Op(name, "memory_bound", work, reads, writes, launches=copies - 1.0, back=VIEW),)
    known = recipe.amax_bytes if norm.does == "finds amax" else 0.0
    launches: FloatK = recipe.kernels_per_cast - (1 if norm.does == "finds amax" else 0)
    together = TENSORS_PER_CAST if recipe.casts_experts_together else 1.0
    launches = launches * ceil(experts / together)

    def kernel(copies: float, like: str, runs: BoolK) -> tuple[MemoryBound, FloatK]:
        nbytes = (recipe.cast_moved_bytes_per_element(0) - known + copies) * moved
        return MemoryBound(where(runs, nbytes, 0.0), like), where(runs, launches, 0.0)

    rows, both = kernel(1.0, recipe.row_cast, alone), kernel(2.0, recipe.row_and_column_cast, logical_not(alone))
    if all_true(alone):
        return (
            Op(name, "memory_bound", rows[0], reads, writes, launches=rows[1], back=VIEW, scratch=scratch, order=order),
        )
    made = Op(name, "memory_bound", both[0], reads, writes, launches=both[1], back=VIEW, scratch=scratch, order=order)
    if not any_true(alone):
        return (made,)
    return made, Op(f"{name}.rows", "memory_bound", rows[0], writes[:1], (), launches=rows[1], present=alone)


def _add(b: TapeBuilder, ops: tuple[Op, ...]) -> None:
    for op in ops:
        b.add(op)


def _norm_in_front(b: TapeBuilder, ctx: Context, recipe: Fp8Recipe, x: str) -> _NormInFront:
    """What the norm in front of a linear, one module with it, has done of its cast; its output in bf16 is not kept.

    A norm that casts takes another time, and so does a general one that finds the largest.
    """
    kernels, place = ctx.kernels, _place_of_norm_in_front(b, x)
    if place is None:
        return NO_NORM
    op, tensor = b.ops[place], b.tensors[x]
    norm = _NormInFront(recipe.norm, None if recipe.norm == "casts" else tensor.bytes)
    b.tensors[x] = tensor._replace(bytes=0.0 * tensor.bytes, grad_bytes=tensor.bytes)
    if not isinstance(op.work, MemoryBound):
        return norm
    tuned, longer, nbytes = has_tuned_norm(ctx, float(op.work.width)), 1.0, op.work.bytes
    if recipe.norm == "casts":
        nbytes = 0.75 * nbytes  # one byte of four is not written
        longer = (kernels.te_tuned_norm_cast if tuned else kernels.te_norm_cast).value
    elif recipe.norm == "finds amax" and not tuned:
        longer = kernels.te_norm_amax.value
    b.ops[place] = op._replace(work=op.work._replace(bytes=nbytes, elements=longer * op.work.elements))
    return norm


def _place_of_norm_in_front(b: TapeBuilder, x: str) -> int | None:
    """The place of the norm that writes ``x`` and is one module with the linear that reads it; None without one."""
    for i, op in enumerate(b.ops):
        if op.writes[:1] == (x,) and not op.weight and op.weight_params and not is_in_region(op.region, "layernorm"):
            return i
    return None


def hold_gradient_copies_until_norm_backward(b: TapeBuilder, ctx: Context, x: str, received: Fp8OutputGradient) -> None:
    """Let the copies of a linear's gradient stay until the norm in front of it is differentiated, where it has one.

    Both are one function of autograd's, which lets them go earlier under sequence parallelism alone
    (module/layernorm_linear.py, ``clear_tensor_data(grad_output)``; h200-te1-ministral8b-7l-delayed-beginning).
    """
    place = _place_of_norm_in_front(b, x)
    if place is not None and (back := b.ops[place].back) is not None:
        copies = tuple(dict.fromkeys((received.dgrad, received.wgrad)))
        back = back._replace(held_copies=copies, holds_copies=logical_not(ctx.gathers_sequence))
        b.ops[place] = b.ops[place]._replace(back=back)


def _reduced_amax(b: TapeBuilder, ctx: Context, x: str, name: str, gathers: BoolK) -> tuple[str, ...]:
    """The largest of a shard reduced over the ranks that hold the others, where the recipe does so."""
    if not fp8_recipe_of(ctx).reduces_amax or gathers is False:
        return ()
    amax = b.tensor(f"{name}.amax", AMAX_BYTES, grad=False)
    return (b.add(_reduce_amax(ctx, name, x, amax, gathers)),)


def _reduce_amax(ctx: Context, name: str, x: str, amax: str, gathers: BoolK) -> Op:
    work = Collective("all_reduce", "tp", AMAX_BYTES)
    by = timed_module_call(ctx, "amax")
    return Op(f"{name}.amax", "tp", work, (x,), (amax,), present=gathers, stream="tp", module_call=by)


def _gathered(
    b: TapeBuilder, ctx: Context, recipe: Fp8Recipe, source: str, name: str, elements: FloatK, gathers: BoolK, *,
    columns: bool = False,
) -> tuple[str, tuple[Op, ...]]:  # fmt: skip
    """A copy gathered over the sequence shards, where they are; ``columns`` lie shard by shard until put in order."""
    if gathers is False:
        return source, ()
    out = b.tensor(
        f"{name}.gathered", _copy_bytes(recipe, elements), grad=False, held_by_watchdog=gathers if columns else False
    )
    work = Collective("all_gather", "tp", _copy_bytes(recipe, elements))
    return out, (Op(f"{name}.all_gather", "tp", work, (source,), (out,), present=gathers, stream="tp"),)


def _shelve(b: TapeBuilder, recipe: Fp8Recipe, shard: str, gathers: BoolK) -> None:
    """What a gather of blocks and their scales is given stays with it: the two are one coalesced collective, of which
    only the outer handle is waited for (te distributed.py, ``_start_all_gather_fp8_blockwise``; torch
    distributed_c10d.py, ``_coalescing_manager`` with a device). A forward's is given up afterwards, as are a backward's
    both; what was kept of an input is cleared, and with it the copy that the collective has."""
    if not recipe.gathers_row_copy_only:
        b.tensors[shard] = b.tensors[shard]._replace(held_by_watchdog=gathers)


def _transposed(
    b: TapeBuilder, column: str, full: str, shard: str, name: str, elements: FloatK, gathers: BoolK
) -> tuple[str, tuple[Op, ...]]:
    """The transposed copy of gathered rows, whose ``shard`` is still there; where nothing was gathered, the one that
    the cast made."""
    out = b.tensor(f"{name}.transposed", 1.0 * elements, grad=False)
    work = MemoryBound(2.0 * elements, "fp8_transpose")
    return out, (Op(f"{name}.transpose", "memory_bound", work, (column, full, shard), (out,), present=gathers),)


def _in_order(
    b: TapeBuilder, recipe: Fp8Recipe, column: str, interleaved: str, name: str, elements: FloatK, gathers: BoolK
) -> tuple[str, tuple[Op, ...]]:
    """Gathered columns, which lie shard by shard, put in order (``_finish_all_gather_fp8_blockwise``); those that lie
    as the tensor does are already."""
    if not recipe.transposes_columns:
        return interleaved, ()
    out = b.tensor(f"{name}.ordered", _copy_bytes(recipe, elements), grad=False)
    work = MemoryBound(2.0 * elements, "fp8_transpose")
    return out, (Op(f"{name}.order", "memory_bound", work, (column, interleaved), (out,), present=gathers),)
