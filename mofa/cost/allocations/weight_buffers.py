"""What a rank holds of its parameter tensors, and its optimizers keep of each.

The tensors themselves are in :mod:`mofa.cost.allocations.parameter_tensors`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mofa.blocks.fp8 import FP8_RECIPES, copies_per_fp8_weight, fp8_weight_copies_bytes_per_param
from mofa.blocks.frameworks.megatron.persistent import WORKSPACE
from mofa.blocks.roles import Purpose
from mofa.cost.allocations.block_trace import BlockTrace
from mofa.cost.allocations.parameter_tensors import ParameterTensor, megatron_buffers_of_rank, optimizer_owned_params
from mofa.cost.optimizer import optimizer_states_bytes_per_param
from mofa.cost.rank_rules import DDP_BUCKET_BYTES
from mofa.cost.rank_spec import RankSpec
from mofa.cost.rows import GatheredRows
from mofa.specs.framework import FrameworkSpec
from mofa.specs.optimizers import ADAM_MOMENTS_BYTES
from mofa.specs.workload import WorkloadSpec


class WeightBytes(NamedTuple):
    """A parameter tensor on one rank: bytes of itself, its main copy, each of its states and temporaries. [B]"""

    name: str
    param_bytes: int
    main_copy_bytes: int
    state_bytes: int
    temporary_bytes: int
    has_expert_optimizer: bool = False
    """Stepped by an optimizer of its own, behind the others': Megatron's experts under expert parallelism."""
    chunk: int = 0
    """The chunk of the rank that it belongs to."""
    is_1d: bool = False
    """Of one dimension: stepped behind the others of its optimizer in Megatron, which does not decay it."""
    fp32_gradient_copy_bytes: int = 0
    """Bytes of the fp32 copy of its gradient, from one step of Megatron's optimizer to the beginning of the next."""
    init_copy_bytes: int = 0
    """Bytes of the copy that first values are drawn in: torchtitan's fp32 one (models/utils.py, ``trunc_normal_``), of
    an fp8 parameter the 16-bit one (te/module/base.py, ``reset_parameters``)."""
    fp8_transpose_bytes: int = 0
    """Bytes of an fp8 parameter's second copy, there from the start."""
    from_host_bytes: int = 0
    """Bytes that its values take on their way from a host that steps it, before they are cast; 0 of a weight that is
    stepped on the device."""
    module: str = ""
    purpose: Purpose = ""
    """As of its :class:`mofa.cost.allocations.parameter_tensors.ParameterTensor`."""


@dataclass(frozen=True)
class FlatBuffer:
    """A buffer of Megatron's data parallelism: the weights in it, from the last to the first, and its bytes. [B]

    ``params`` is 0 where they stay where they are, without the distributed optimizer. Of those that are gathered and
    then copied out all stay (``keeps_tensors``); the fp8 ones among them are gathered into the gradients' bytes.
    """

    weights: tuple[int, ...]
    params: int
    grads: int
    keeps_tensors: bool = False


def weight_bytes_of_rank(
    workload: WorkloadSpec, framework: FrameworkSpec, spec: RankSpec, params: tuple[ParameterTensor, ...],
    data_rank: int,
) -> tuple[WeightBytes, ...]:  # fmt: skip
    """What a rank holds of each parameter and its optimizers' states; the rest of its bytes is proportional to it.

    Parameters
    ----------
    data_rank
        Which of the ranks that hold the same parameters: Megatron's distributed optimizer gives each another part of
        its buffers, whatever tensors that cuts, so that most tensors are some rank's whole.
    """
    fw, parameters = framework, spec.parameters
    dense, expert = spec.place.dense_ranks, spec.place.expert_ranks
    fsdp = spec.gradients.shards_params
    megatron = spec.gradients.has_flat_buffers or bool(fw.deepspeed)
    distributed = megatron and spec.gradients.shards_states
    stored_params = parameters.sharded if fsdp else parameters.total
    stepped_params = parameters.sharded if fsdp or distributed else parameters.total
    held_bytes = parameters.params_bytes
    if spec.gradients.keeps_params_gathered:
        held_bytes -= 2.0 * parameters.total
    states = parameters.states_bytes / stepped_params
    if fw.optimizer_offload:  # by tensor: without_states_on_hosts
        states = optimizer_states_bytes_per_param(workload, fw)
    main, num_moments = 0.0, workload.optimizer.traits.num_moments
    if megatron:
        main = max(fw.states_bytes_per_param - ADAM_MOMENTS_BYTES, 0.0)
    chained = megatron and spec.place.splits_experts
    temporary = (
        fw.optimizer_step_kernels.temporary_bytes_per_param
        if megatron
        else parameters.step_scratch_bytes / stepped_params
    )
    wide = 4.0 if fw.widens_gradients else 0.0
    even = [p.params / (expert if p.expert else dense) for p in params]
    own = even if fsdp or (distributed and fw.deepspeed) else [p.params for p in params]
    if distributed and not fw.deepspeed:
        own = optimizer_owned_params(fw, spec, params, data_rank)
    stored = even if fsdp else [p.params for p in params]
    width = held_bytes / stored_params
    drafted = fw.traits.draws_weights_wide and round(width) < 4
    alone = any(p.purpose == "output" for p in params) or not workload.model.tied_embeddings
    return tuple(
        WeightBytes(
            p.name, int(width * stored[n]), int(main * own[n]), int((states - main) / max(num_moments, 1) * own[n]),
            int(temporary * own[n]), chained and p.expert, p.chunk, p.flat, int(wide * own[n]),
            int(4 * stored[n]) if drafted and not p.flat and not (alone and p.purpose == "embedding") else 0,
            module=p.module, purpose=p.purpose,
        )
        for n, p in enumerate(params)
    )  # fmt: skip


def without_states_on_hosts(
    framework: FrameworkSpec, weights: tuple[WeightBytes, ...], buffers: Sequence[FlatBuffer]
) -> tuple[WeightBytes, ...]:
    """The weights without the states of those that hosts step: of each optimizer whole tensors, in its order, until the
    share is reached (Megatron-Core 0.16.1, hybrid_optimizer.py, ``_get_sub_optimizer_param_groups``)."""
    if not framework.optimizer_offload:
        return weights
    on_hosts: dict[int, WeightBytes] = {}
    for of_one in weights_by_optimizer(weights, buffers):
        threshold = framework.optimizer_offload * sum(w.main_copy_bytes for w in of_one)
        taken = 0
        for w in of_one:
            if taken < threshold:
                taken += w.main_copy_bytes
                on_hosts[id(w)] = w._replace(
                    main_copy_bytes=0, state_bytes=0, fp32_gradient_copy_bytes=0, from_host_bytes=w.main_copy_bytes
                )
    return tuple(on_hosts.get(id(w), w) for w in weights)


def with_fp8_weight_bytes(
    rows: GatheredRows, weights: tuple[WeightBytes, ...], layers: Collection[str]
) -> tuple[WeightBytes, ...]:
    """The weights where parameters are fp8: those of these ``layers`` take a byte a parameter for each copy."""
    recipe, fw = rows.workload.precision.fp8_recipe, rows.framework
    if not fw.fp8_params or not recipe:
        return weights
    transposes = rows.costs.context.fp8_transposes
    copies = copies_per_fp8_weight(recipe, transposes)
    each = fp8_weight_copies_bytes_per_param(recipe, transposes) / copies / 2.0
    return tuple(
        w._replace(param_bytes=int(w.param_bytes * each), init_copy_bytes=w.param_bytes,
        fp8_transpose_bytes=(copies - 1) * int(w.param_bytes * each))
        if w.module in layers and not w.is_1d else w
        for w in weights
    )  # fmt: skip


def te_buffers_taken_at_build(
    framework: FrameworkSpec, spec: RankSpec, weights: Sequence[WeightBytes]
) -> tuple[tuple[int, int], ...]:
    """What Transformer Engine's modules take for good while parameters are made: behind which, and how much. [B]

    The workspace of products comes with the first linear, which is attention's output (module/linear.py,
    ``_prealloc_cublas_workspace``); tables of rotations of latent attention, each layer's, are put behind all.
    """
    if framework.library is None or not weights:
        return ()
    first = next((n for n, w in enumerate(weights) if w.purpose == "attention_output"), 0)
    tables = spec.buffers.rotary_tables_from_start * len(spec.layer_numbers)
    return (first, WORKSPACE), *((len(weights) - 1, nbytes) for nbytes in tables)


def flat_buffers(
    framework: FrameworkSpec, spec: RankSpec, params: tuple[ParameterTensor, ...], weights: tuple[WeightBytes, ...],
    fp8_recipe: str = "",
) -> tuple[FlatBuffer, ...]:  # fmt: skip
    """Megatron's flat buffers of a rank, with the bytes of their parameters and gradients; without
    the distributed optimizer parameters stay where they are."""
    if not spec.gradients.has_flat_buffers:
        return ()
    out = []
    copied_out = framework.fp8_params and bool(fp8_recipe) and FP8_RECIPES[fp8_recipe].gathers_params_in_bf16
    for b in megatron_buffers_of_rank(framework, spec, params):
        padding = b.buckets[-1] / max(sum(round(params[n].params) for n in b.members), 1)
        gathered = [n for n in b.members if not (copied_out and weights[n].fp8_transpose_bytes)]
        params_bytes = int(padding * sum(weights[n].param_bytes for n in gathered))
        grads_bytes = int(framework.grads_bytes_per_param * b.buckets[-1])
        params_bytes = params_bytes if spec.gradients.shards_states else 0
        out.append(FlatBuffer(b.members, params_bytes, grads_bytes, keeps_tensors=copied_out))
    return tuple(out)


def weights_by_optimizer(
    weights: Sequence[WeightBytes], buffers: Sequence[FlatBuffer]
) -> tuple[tuple[WeightBytes, ...], ...]:
    """The weights of each optimizer, in its order: Megatron's distributed one takes them as its buffers hold them, from
    the last to the first of each chunk, and each has matrices before what is not decayed (optimizer/__init__.py).
    """
    ordered: Iterable[WeightBytes] = weights
    if buffers:
        turned = any(flat.params for flat in buffers)
        order = [n for flat in buffers for n in (flat.weights if turned else ())] or range(len(weights))
        ordered = sorted((weights[n] for n in order), key=lambda w: w.is_1d)
    of_each: tuple[list[WeightBytes], list[WeightBytes]] = ([], [])
    for w in ordered:
        of_each[w.has_expert_optimizer].append(w)
    return tuple(tuple(of_one) for of_one in of_each if of_one)


def ddp_bucket_tensors_by_chunk(
    chunks: Sequence[Sequence[BlockTrace]], total: int, width: float, *, tied: bool
) -> tuple[tuple[int, ...], ...]:
    """DDP's buckets of each chunk, in the order in which its backward makes gradients: a gradient goes into the bucket
    that is being filled, which is closed once it has :data:`mofa.cost.rank_rules.DDP_BUCKET_BYTES` (reducer.cpp,
    compute_bucket_assignment_by_size).

    What no op of a tape names, norms, is in the last. [B]

    Parameters
    ----------
    total
        Bytes of all of them; of none there are no buckets.
    width
        Bytes of a gradient.
    tied
        Whether the head's weight is the embedding's.
    """
    out = []
    for chunk in chunks if total else ():
        ready: list[int] = []
        for trace in reversed(chunk):
            weights = {weight.name: int(width * weight.params) for weight in trace.weights}
            made = [op_trace.origin for op_trace in trace.backward if op_trace.role == "wgrad"]
            first = [name for name in made if name in weights and not (tied and trace.name == "head")]
            ready += [weights.pop(name) for name in dict.fromkeys(first)]
            ready += [] if tied and trace.name == "head" else list(weights.values())
        filled = [0]
        for size in ready:
            if filled[-1] >= DDP_BUCKET_BYTES:
                filled.append(0)
            filled[-1] += size
        out.append(filled)
    missing = total - sum(sum(filled) for filled in out)
    for filled in out:
        filled[-1] += missing // len(out)
    return tuple(tuple(filled) for filled in out)
