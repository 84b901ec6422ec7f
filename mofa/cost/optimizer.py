"""Parameters, gradients and optimizer states of a rank, and the seconds and temporaries of the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.fp8 import (
    FP8_RECIPES,
    Fp8Recipe,
    copies_per_fp8_weight,
    fp8_weight_copies_bytes_per_param,
    transformer_engine_recipe,
)
from mofa.cost.kernels.compute import memory_bound_bytes_per_s
from mofa.specs.base import Fact
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec, GpuSpec
from mofa.specs.optimizers import ADAM_MOMENTS_BYTES
from mofa.specs.workload import WorkloadSpec

ArrayN = NDArray[np.float64]
IntN = NDArray[np.int64]


@dataclass(frozen=True)
class ParameterShards:
    """Parameters of a stage on one rank before data parallelism, and the ranks that share them. [params, ranks]

    ``dense`` and ``expert`` have shape (n, R), ``dense_ranks`` and ``expert_ranks`` (n, 1).
    """

    dense: ArrayN
    expert: ArrayN
    dense_ranks: ArrayN
    expert_ranks: ArrayN

    def unsharded_bytes(self, bytes_per_param: float) -> ArrayN:
        """Bytes of something that every rank holds whole. (n, R) [B]"""
        return (self.dense + self.expert) * bytes_per_param

    def sharded_bytes(self, bytes_per_param: float) -> ArrayN:
        """Bytes of something that is shared out over the data-parallel ranks. (n, R) [B]"""
        return (self.dense / self.dense_ranks + self.expert / self.expert_ranks) * bytes_per_param


def optimizer_states_bytes_per_param(workload: WorkloadSpec, framework: FrameworkSpec) -> float:
    """An optimizer's states with the main copy, before sharding, on devices and hosts; moments take half where the
    recipe says bf16. [B/param]

    Examples
    --------
    >>> from mofa.specs.load import load_framework, load_workload
    >>> optimizer_states_bytes_per_param(load_workload("llama3-8b"), load_framework("megatron"))
    12.0
    """
    num_moments = workload.optimizer.traits.num_moments
    less = 2.0 * num_moments if workload.precision.moments == "bf16" else 0.0
    return framework.states_bytes_per_param - ADAM_MOMENTS_BYTES + 4.0 * num_moments - less


DEEPSPEED_BUCKET = 2.0 * 500_000_000
"""ZeRO's copy of 16-bit gradients to reduce (``reduce_bucket_size`` 5e8 elements). [B]"""
STEPPED = 6.0
"""Of ZeRO 1's part in its step, when the second of the two halves of all weights is cast: fp32 gradients of both, this
half's 16-bit ones and their flat copy (zero/stage_1_and_2.py). [B/param]"""
STEPPED_WHOLE = 5.0
"""Beside 16-bit gradients without ZeRO: fp32 ones of both halves, a half's once more before they are joined, less the
first half's 16-bit ones (fp16/fused_optimizer.py). [B/param]"""


@dataclass(frozen=True)
class StaticBytes:
    """Bytes that a stage holds all the time or between its first gradient and the end of the step. (n, R) [B]

    ``grads_always`` says whether gradients exist from the start (Megatron's buffers) or only once computed.
    """

    params: ArrayN
    grads: ArrayN
    states: ArrayN
    buffers: ArrayN
    step_scratch: ArrayN
    grads_always: bool


def static_bytes(
    workload: WorkloadSpec,
    framework: FrameworkSpec,
    shards: ParameterShards,
    precision: str,
    pipelined: bool,
    zero: NDArray[np.int64],
    replicas: IntN | int = 1,
    ep: IntN | int = 1,
    fp8_transposes: bool = True,
    in_layers: ArrayN | None = None,
    tp: IntN | int = 1,
    amp: bool = False,
) -> StaticBytes:
    """Static bytes of a stage, all that it holds besides activations; ``in_layers`` are the parameters of its layers,
    where it has others.

    Megatron: bf16 parameters (2), fp32 main gradients (4), fp32 main parameters and two moments (12) that the
    distributed optimizer shares out: 6 + 12/dp bytes a parameter; without it 18. torchtitan: fp32 parameters and two
    moments, sharded; under pipelines the gathered bf16 weights (2) and unsharded fp32 gradients (4) on top; under
    autocast everything fp32 and whole (16), or in bf16 (8); DDP keeps buckets apart from the gradients (4 or 2
    more). Under expert parallelism Megatron's experts have an optimizer of their own, which steps behind the other
    (optimizer/__init__.py, ChainedOptimizer): temporaries are those of the larger.

    References
    ----------
    Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3.1: 16 bytes a parameter in mixed precision with Adam.
    """
    params, grads = framework.params_bytes_per_param, framework.grads_bytes_per_param
    num_moments, states = workload.optimizer.traits.num_moments, optimizer_states_bytes_per_param(workload, framework)
    zeros = np.zeros_like(shards.dense)
    if not framework.traits.has_pytorch_modules:
        states *= 1.0 - framework.optimizer_offload
        sharded = np.where(zero >= 1, shards.sharded_bytes(states), shards.unsharded_bytes(states))
        temporary = framework.optimizer_step_kernels.temporary_bytes_per_param
        has_expert_optimizer = np.asarray(ep) > 1
        dense, expert = replace(shards, expert=0.0 * shards.expert), replace(shards, dense=0.0 * shards.dense)

        def temporaries(part: ParameterShards) -> ArrayN:
            return np.where(zero >= 1, part.sharded_bytes(temporary), part.unsharded_bytes(temporary))

        scratch = np.where(
            has_expert_optimizer, np.maximum(temporaries(dense), temporaries(expert)), temporaries(shards)
        )
        if framework.widens_gradients:  # of all optimizers, before the first one steps
            widened = 4.0 * (1.0 - framework.optimizer_offload)
            scratch = scratch + np.where(zero >= 1, shards.sharded_bytes(widened), shards.unsharded_bytes(widened))
        # Transformer Engine keeps fp8 copies of its linears' weights, in the layouts that products want, over the
        # micro-batches of a step; embedding and head are none of its (what fp8 parameters take, of which one layout is
        # the parameters', is no more than bf16 ones)
        copies = zeros
        if recipe := transformer_engine_recipe(workload, framework):
            copied = shards.unsharded_bytes(1.0) if in_layers is None else in_layers
            each = fp8_weight_copies_bytes_per_param(recipe, fp8_transposes)
            copies = _fp8_param_bytes_beside(recipe, each, shards, copied) if framework.fp8_params else each * copied
        if framework.deepspeed in ("zero0", "zero1"):  # 16-bit gradients come with a backward, fp32 ones in the step
            state = workload.optimizer.traits.main_and_moments_bytes_per_param()
            states_kept = np.where(zero >= 1, shards.sharded_bytes(state), shards.unsharded_bytes(state))
            # all are launched before the first one is over
            sent = shards.unsharded_bytes(grads) * _sent_together(workload, tp)
            if framework.launch_blocking:
                sent = np.minimum(sent, DEEPSPEED_BUCKET)
            step = np.where(
                zero >= 1,
                shards.sharded_bytes(STEPPED) - shards.unsharded_bytes(grads),
                shards.unsharded_bytes(STEPPED_WHOLE),
            )
            return StaticBytes(
                shards.unsharded_bytes(params),
                shards.unsharded_bytes(grads),
                states_kept,
                copies,
                np.maximum(sent, step),
                False,
            )
        if framework.deepspeed:  # 16-bit copies of the two halves' gradients to reduce
            scratch = shards.unsharded_bytes(1.0 if framework.launch_blocking else 2.0)
        return StaticBytes(
            shards.unsharded_bytes(params), shards.unsharded_bytes(grads), sharded, copies, scratch, True
        )
    temporary = framework.optimizer_step_kernels.temporary_bytes_per_param
    # DDP's buckets lie beside the gradients
    has_buckets = np.logical_or(np.asarray(replicas) > 1, framework.data_parallel == "ddp")
    if precision == "autocast":
        buffers = np.where(has_buckets, shards.unsharded_bytes(4.0), zeros)
        return StaticBytes(
            shards.unsharded_bytes(params),
            shards.unsharded_bytes(grads),
            shards.unsharded_bytes(states),
            buffers,
            shards.unsharded_bytes(temporary),
            False,
        )
    if precision == "uniform":
        each = torchtitan_optimizer_element_bytes(workload, precision)
        return StaticBytes(
            shards.unsharded_bytes(each), shards.unsharded_bytes(each), shards.unsharded_bytes(num_moments * each),
            np.where(has_buckets & amp, shards.unsharded_bytes(each), zeros),
            shards.unsharded_bytes(temporary * each / 4), False,
        )  # fmt: skip
    narrow = torchtitan_optimizer_element_bytes(workload, precision) / 4.0  # everything in training.dtype
    params_bytes, reduced = shards.sharded_bytes(params * narrow), shards.sharded_bytes(grads * narrow)
    if pipelined:
        # the sharded gradients come when the unsharded ones go, at the end of the step, and go when the next one begins
        params_bytes, reduced = params_bytes + shards.unsharded_bytes(2.0), shards.unsharded_bytes(4.0)
    return StaticBytes(
        params_bytes,
        reduced,
        shards.sharded_bytes(states * narrow),
        zeros,
        shards.sharded_bytes(temporary * narrow),
        False,
    )


def torchtitan_optimizer_element_bytes(workload: WorkloadSpec, precision: str) -> float:
    """Bytes of a parameter of torchtitan's as its optimizer holds it, and of its gradient and each state: fp32 where
    FSDP or autocast mixes precision, bf16 where nothing does, unless ``training.dtype`` says otherwise. [B]

    Examples
    --------
    >>> from mofa.specs.load import load_workload
    >>> llama = load_workload("llama3-8b")
    >>> [torchtitan_optimizer_element_bytes(llama, mode) for mode in ("mixed", "autocast", "uniform")]
    [4.0, 4.0, 2.0]
    """
    wanted = workload.precision.params or ("bf16" if precision == "uniform" else "fp32")
    return 2.0 if wanted == "bf16" else 4.0


def optimizer_steps_in_16_bit(workload: WorkloadSpec, framework: FrameworkSpec, precision: str) -> bool:
    """Whether the optimizer steps on parameters, gradients and states of 16 bits."""
    return framework.traits.has_pytorch_modules and torchtitan_optimizer_element_bytes(workload, precision) == 2.0


def optimizer_rates_16_bit_over_fp32(framework: FrameworkSpec, gpu: GpuSpec) -> dict[str, Fact]:
    """Rates of an optimizer's kernels on 16-bit tensors over those on fp32 ones, by the part of its step. [-]"""
    rates = gpu.curves.optimizer_16_bit
    op_by_op = framework.optimizer in ("foreach", "for-loop")
    return {
        "adam": rates.adam_foreach if op_by_op else rates.adam_fused,
        "norm": rates.grad_norm,
        "clip": rates.grad_clip,
    }


def _sent_together(workload: WorkloadSpec, tp: IntN | int) -> ArrayN:
    """The share of a layer's 16-bit gradients that DeepSpeed copies to reduce several as one: of those that fill more
    than half a bucket most are reduced where they are. (n, 1) [-]"""
    model, a = workload.model, workload.model.attention
    width = (model.mlp.ffn_hidden or 0) if model.mlp is not None else 0
    up = width * (2 if model.mlp is not None and model.mlp.gated else 1)
    query = a.num_heads * a.d_qk
    value = a.num_heads * a.d_v
    kv = (a.num_kv_heads or a.num_heads) * (a.d_qk + a.d_v)
    sizes = [2.0 * model.hidden * n / np.asarray(tp, dtype=float) for n in (query + kv, value, up, width)]
    several = sum(np.where(size <= DEEPSPEED_BUCKET / 2, size, 0.0) for size in sizes)
    return np.asarray(several / sum(sizes))


def embedding_gradient_extra_bytes(
    workload: WorkloadSpec, framework: FrameworkSpec, precision: str, pipelined: bool, tp: IntN, is_first: ArrayN
) -> ArrayN:  # fmt: skip
    """What the embedding's gradient has over the parameter's own bytes. (n, R) [B]

    torchtitan's tensor parallelism splits the table by rows, and no rule of distributed tensors splits its gradient
    so: without FSDP each rank keeps all rows until the step's end (torch/distributed/tensor/_ops/_embedding_ops.py,
    ``embedding_dense_backward_strategy``), under FSDP's pipelines in fp32. Added to the output layer's, where that is
    the same weight, it is split.
    Three layers of Llama 3 8B over two H200s held 6.908 GiB between steps, of which this is 0.489.

    Examples
    --------
    >>> from mofa.specs.load import load_framework, load_workload
    >>> llama, titan = load_workload("llama3-8b"), load_framework("torchtitan")
    >>> more = embedding_gradient_extra_bytes(llama, titan, "uniform", False, np.array([1, 2]), np.array([1.0, 0.0]))
    >>> (more / 2**20).tolist()
    [[0.0, 0.0], [501.0, 0.0]]
    """
    model, plain = workload.model, precision == "uniform"
    keeps_table = framework.traits.has_pytorch_modules and not model.tied_embeddings and (plain or pipelined)
    each = torchtitan_optimizer_element_bytes(workload, precision) if plain else 4.0
    table = each * float(model.vocab) * model.hidden if keeps_table else 0.0
    return np.asarray(table * (1.0 - 1.0 / tp)[:, None] * is_first[None])


def optimizer_seconds(
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    framework: FrameworkSpec,
    shards: ParameterShards,
    precision: str,
    zero: NDArray[np.int64],
    parts: Mapping[str, ArrayN] | None = None,
) -> ArrayN:
    """Optimizer step with gradient norm, clipping and copies; launches by the host apart. (n, R) [s]

    Bytes a parameter, each over the measured rate of its kernels: Adam reads parameter, gradient and two moments and
    writes all but the gradient (28 in fp32 fused, 56 by separate kernels). The norm reads 4, and clipping reads and
    writes 8 in the share of steps that a framework clips; half of it where torchtitan holds bf16, at
    :func:`optimizer_rates_16_bit_over_fp32` of the rate. Megatron besides zeroes (4) and scales (8) the whole gradient
    buffer,
    half of it in bf16, and copies main to bf16 parameters (6, shared out). It turns bf16 gradients into fp32 ones (6,
    shared out). ``parts`` are those of :func:`optimizer_device_seconds_by_part` where they are known.
    """
    parts = (
        optimizer_device_seconds_by_part(workload, cluster, framework, shards, precision, zero)
        if parts is None
        else parts
    )
    return np.asarray(
        sum(parts.values()) + 100 * cluster.slowest_host_factor * cluster.gpu.curves.host.eager_op_s.value
    )


def optimizer_device_seconds_by_part(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, shards: ParameterShards, precision: str,
    zero: NDArray[np.int64],
) -> dict[str, ArrayN]:  # fmt: skip
    """Seconds on the device of each part of the optimizer step. (n, R) [s]"""
    gpu = cluster.gpu
    each = 2.0 if workload.precision.moments == "bf16" else 4.0
    moments = 2.0 * each * workload.optimizer.traits.num_moments  # read and written
    op_by_op = framework.optimizer_step_kernels.op_by_op
    rate = memory_bound_bytes_per_s(gpu, "adam_foreach" if op_by_op else "adam_fused")
    adam = (12.0 + moments + (28.0 if op_by_op else 0.0)) / rate
    per_param = {"adam": adam}
    if workload.optimizer.clip_grad_norm:
        per_param["norm"] = 4.0 / memory_bound_bytes_per_s(gpu, "grad_norm")
        per_param["clip"] = framework.clipped_steps * 8.0 / memory_bound_bytes_per_s(gpu, "grad_clip")
    if framework.traits.has_pytorch_modules:
        if optimizer_steps_in_16_bit(workload, framework, precision):
            rates = optimizer_rates_16_bit_over_fp32(framework, gpu)
            per_param = {name: s / 2.0 / rates[name].value for name, s in per_param.items()}
        is_unsharded = precision in ("autocast", "uniform")
        return {
            name: shards.unsharded_bytes(s) if is_unsharded else shards.sharded_bytes(s)
            for name, s in per_param.items()
        }
    per_param["copy"] = 6.0 / memory_bound_bytes_per_s(gpu, "cast_down")
    if framework.widens_gradients:
        per_param["widen"] = 6.0 / memory_bound_bytes_per_s(gpu, "cast_up")
    for name in {"adam", "copy", "widen"} & set(per_param):  # the rest is stepped on hosts
        per_param[name] *= 1.0 - framework.optimizer_offload
    parts = {
        name: np.where(zero >= 1, shards.sharded_bytes(s), shards.unsharded_bytes(s)) for name, s in per_param.items()
    }
    width = 4.0 if framework.deepspeed else framework.grads_bytes_per_param
    scaled = shards.unsharded_bytes(2.0 * width / memory_bound_bytes_per_s(gpu, "grad_clip"))
    scaled = np.where(shards.dense_ranks > 1, scaled, 0.0)
    return {
        **parts,
        "zero": shards.unsharded_bytes(width / memory_bound_bytes_per_s(gpu, "megatron zero_buffer")),
        "scale": scaled,
    }


def _fp8_param_bytes_beside(recipe: str, copies: float, shards: ParameterShards, in_layers: ArrayN) -> ArrayN:
    """What fp8 parameters take beside the two bytes that each parameter is counted with. (n, R) [B]

    Of those with one scale a tensor both layouts take no more than that. Where they are gathered in bf16 they have no
    buffer: the layers' take all their copies, and what stays in bf16 is there once more in the one that is gathered.
    """
    if not FP8_RECIPES[recipe].gathers_params_in_bf16:
        return 0.0 * shards.unsharded_bytes(1.0)
    return (copies - 2.0) * in_layers + 2.0 * (shards.unsharded_bytes(1.0) - in_layers)


def weight_cast_seconds(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, linears: ArrayN, owners: ArrayN
) -> ArrayN:
    """Casts of the layers' weights, once a step, in the first micro-batch's forward pass. (g, R) [s]

    Transformer Engine keeps the copies over the micro-batches (module/base.py, ``quantize_weight``; Megatron's
    ``is_first_microbatch``). fp8 parameters are cast shard by shard behind the copy of the main parameters
    (:func:`fp8_cast_seconds_per_param`), and transposed once they are gathered (tensor/utils.py,
    ``post_all_gather_processing``); those that are gathered in bf16 are all cast then, and their place in the buffer of
    the gradients is zeroed. Pipelines wait for each stage's in turn as they fill; one stage's is counted.

    Parameters
    ----------
    linears
        Parameters of a stage's layers on one rank. (g, R) [params]
    owners
        Ranks that share the optimizer's states of a layer. (g, 1) [-]
    """
    recipe, gpu = FP8_RECIPES[workload.precision.fp8_recipe], cluster.gpu
    copies = copies_per_fp8_weight(recipe.name, gpu.fp8_transposes)
    if framework.fp8_params and not recipe.gathers_params_in_bf16:
        cast = fp8_cast_seconds_per_param(recipe, gpu)
        return np.asarray(
            linears * (2.0 * (copies - 1) / memory_bound_bytes_per_s(gpu, "fp8_transpose")) + linears / owners * cast
        )
    zeroed = 2.0 / memory_bound_bytes_per_s(gpu, "megatron zero_buffer") if framework.fp8_params else 0.0
    cast = recipe.cast_moved_bytes_per_element(copies) / memory_bound_bytes_per_s(gpu, recipe.weight_cast)
    return np.asarray(linears * (cast + zeroed))


def fp8_first_micro_batch_saving_s(framework: FrameworkSpec, linears: ArrayN, gpu: GpuSpec) -> ArrayN:
    """What a step's first micro-batch saves under fp8: its products write gradients instead of adding. (g, R) [s]

    Transformer Engine adds where ``is_first_microbatch`` is False (module/linear.py, ``accumulate_wgrad_into_param_
    main_grad``), which Megatron sets under fp8 alone (transformer/module.py, ``set_is_first_microbatch``). In
    te1-mixtral-2l-blockwise-skewed-traced (fitting half) one layer's weight products take 1.6 ms less in the first.
    """
    if not framework.fuses_wgrad_accumulation:
        return 0.0 * linears
    return np.asarray(framework.grads_bytes_per_param * linears / memory_bound_bytes_per_s(gpu, "te wgrad_add"))


def fp8_cast_seconds_per_param(recipe: Fp8Recipe, gpu: GpuSpec) -> float:
    """Casts of a rank's shard of main parameters to fp8 ones, per parameter. [s/param]

    Besides the copy to bf16, which the optimizer makes of all its parameters: a kernel that finds the largest, but for
    delayed scaling, and the cast (tensor/utils.py, ``quantize_master_weights``). With one scale a tensor the shard is
    one long row. Where transposed copies are made the cast makes one of that row too, which nobody reads, by a kernel
    for tiles of 128 rows: it issues instructions for all of them, so that it takes as long on any memory.

    References
    ----------
    Transformer Engine 2.20.2, common/transpose/cast_transpose.cu (``cast_transpose_general_kernel``) and
    common/recipe/fp8_block_scaling.cu (``fp8_block_scaling_partial_cast``, which makes no transposed copy).
    """
    row_rate = memory_bound_bytes_per_s(gpu, recipe.row_cast)
    if recipe.gathers_row_copy_only and gpu.fp8_transposes:
        return recipe.main_param_amax_bytes / row_rate + 4.0 / memory_bound_bytes_per_s(gpu, recipe.main_param_cast)
    return (recipe.main_param_amax_bytes + 3.0) / row_rate
