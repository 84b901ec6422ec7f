"""A job before its search: the changes of ``--with``, refusals of what is not modelled, and routing loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import ValidationError

from mofa.blocks.float8 import AUTO_FILTER
from mofa.blocks.frameworks import primitives_of
from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.host_optimizer import refuse_optimizer_beyond_host_memory
from mofa.errors import SpecError
from mofa.routing.rank_load import routing_loads
from mofa.routing.scheduled import loads_with_token_scheduling
from mofa.specs.activation_offload import ACTIVATION_OFFLOAD, offloadable_modules_of_model, refuse_absent_modules
from mofa.specs.framework import FrameworkSpec
from mofa.specs.framework_names import FRAMEWORK_NAMES
from mofa.specs.framework_offers import OFFERED
from mofa.specs.framework_traits import TRAITS
from mofa.specs.hardware import ClusterSpec
from mofa.specs.implied_facts import implied_facts
from mofa.specs.layer_kind_params import refuse_unmodelled_layer_kinds
from mofa.specs.model import ModelSpec
from mofa.specs.optimizer_offload import OPTIMIZER_OFFLOAD
from mofa.specs.strategy import StrategyTable
from mofa.specs.workload import FP8_RECIPES, OLD_FP8, PrecisionSpec, WorkloadSpec

OF_EXPERTS = ("deepep", "expert_overlap", "micro_moe", "token_chunks", "moeblaze")
"""Words of ``--with`` that are about experts."""


THREADS_OF_WORD = 8
"""Threads of a rank with ``--with optimizer_offload``: nodes of eight GPUs have more cores for each (NVIDIA's DGX H100
112 in all, docs.nvidia.com/dgx/dgxh100-user-guide). [-]"""


class SwitchOfOptionalModelPart(NamedTuple):
    """A framework's switch that acts on something that some models lack."""

    neutral_value: bool
    """The value with which it changes nothing."""
    model_has_it: bool
    """Whether the model has what it acts on."""
    needed_part: str
    """What it acts on, in words."""


def _switches(model: ModelSpec, framework: FrameworkSpec) -> dict[str, SwitchOfOptionalModelPart]:
    """A framework's switches by field."""
    heads = model.attention
    grouped = heads.num_kv_heads < heads.num_heads
    experts = model.moe is not None, "experts"
    refused = {
        "permute_fusion": SwitchOfOptionalModelPart(True, *experts),
        "router_fusion": SwitchOfOptionalModelPart(False, *experts),
        "router_padding": SwitchOfOptionalModelPart(False, *experts),
        "shards_head_norms": SwitchOfOptionalModelPart(True, heads.qk_norm, "norms over heads (qk_norm)"),
        "repeats_keys": SwitchOfOptionalModelPart(False, grouped, "keys that several query heads share"),
    }
    if framework.library is not None:
        refused["fused_rope"] = SwitchOfOptionalModelPart(
            True, model.positions == "rope", "rotary embeddings (positions: rope)"
        )
        refused["fused_swiglu"] = SwitchOfOptionalModelPart(
            True, model.mlp.activation == "swiglu", "SwiGLU (mlp.activation: swiglu)"
        )
    return refused


def _refuse_idle_switches(model: ModelSpec, framework: FrameworkSpec) -> None:
    """Refuse switches that would change nothing, as the model has nothing for them to act on."""
    for field, switch in _switches(model, framework).items():
        if not switch.model_has_it and (value := getattr(framework, field)) != switch.neutral_value:
            said = str(value).lower()
            raise SpecError(f"{field}: {said} needs {switch.needed_part}, and {model.name} has none; leave it out")


def with_numerics(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, words: Sequence[str]
) -> tuple[WorkloadSpec, ClusterSpec, FrameworkSpec]:
    """The job with the number formats and dispatcher of ``--with``, on GPUs with the kernels of its PyTorch version.

    Raises
    ------
    SpecError
        If the GPU or the framework lacks what is named, or the model's layers are not modelled yet.
    """
    refuse_unmodelled_layer_kinds(workload.model)
    precision = _asked_precision(workload.precision, words)
    _refuse_precision(precision, cluster, framework)
    _refuse_fp8_switches(precision, workload, framework, words)
    _refuse_float8(precision, workload.model, framework)
    _refuse_kept_weights(workload.model, framework)
    _refuse_software(cluster, framework)
    _refuse_idle_switches(workload.model, framework)
    _refuse_attention(workload.model, framework)
    refuse_absent_modules(workload.model, framework.activation_offload)
    _refuse_unlearned_positions(workload)
    _refuse_capacity_beyond_tokens(workload)
    framework = _with_optimizer(workload, framework)
    framework = _with_words(workload, framework, words)
    if framework.optimizer_offload and precision.moments == "bf16":
        raise SpecError("optimizer_offload: hosts step with fp32 moments; leave precision.moments out")
    refuse_optimizer_beyond_host_memory(workload, cluster, framework)
    if framework.offloaded_activations.offloads_any and precision.fp8_recipe:
        raise SpecError(
            f"activation_offload ({framework.activation_offload}): is not modelled with fp8 products, whose casts it "
            "would offload too; use precision.gemm: bf16"
        )
    return (
        workload.model_copy(update={"precision": precision}),
        cluster.with_pytorch_release_kernels(framework.pytorch),
        framework,
    )


def _asked_precision(precision: PrecisionSpec, words: Sequence[str]) -> PrecisionSpec:
    """The number formats with those that ``--with`` names."""
    formats = [word for word in (*FP8_RECIPES, OLD_FP8) if word in words]
    if len(formats) > 1:
        raise SpecError(f"--with: {' and '.join(formats)} exclude each other; give one of them")
    if formats:
        precision = precision.model_copy(update={"gemm": formats[0]})
    if "bf16_moments" in words:
        precision = precision.model_copy(update={"moments": "bf16"})
    return precision


def _refuse_precision(precision: PrecisionSpec, cluster: ClusterSpec, framework: FrameworkSpec) -> None:
    """Refuse number formats that the GPU or the framework does not have."""
    if precision.peak_format not in cluster.gpu.peak_flops_per_s:
        raise SpecError(f"{cluster.gpu.name}: has no {precision.peak_format} matrix products; use precision.gemm: bf16")
    if precision.fp8_recipe:
        _refuse_recipe(precision, cluster, framework)
    if precision.params == "fp32" and not framework.traits.has_pytorch_modules:
        raise SpecError(f"{framework.name}: holds bf16 parameters; leave precision.params out or use torchtitan")
    if precision.moments == "bf16" and not framework.traits.has_narrow_moments:
        raise SpecError(
            f"{framework.name}: its optimizer's moments are as wide as what it steps; leave precision.moments out or "
            "use megatron, whose Transformer Engine has them apart"
        )


def _refuse_recipe(precision: PrecisionSpec, cluster: ClusterSpec, framework: FrameworkSpec) -> None:
    """Refuse a recipe of fp8 that the framework, or Transformer Engine on the GPU, does not have."""
    known = framework.traits.fp8_recipes
    if not known:
        raise SpecError(f"{framework.name}: fp8 is modelled for megatron, torchtitan and fsdp1 only; use one of them")
    if precision.fp8_recipe not in known:
        offered = " or ".join(f"fp8-{recipe}" for recipe in known)
        raise SpecError(f"{framework.name}: has no {precision.gemm}; use {offered}")
    recipes = cluster.gpu.fp8_recipes
    if not framework.traits.has_torchao and precision.fp8_recipe not in recipes:
        offered = " or ".join(f"fp8-{recipe}" for recipe in recipes) or "bf16"
        raise SpecError(f"{cluster.gpu.name}: Transformer Engine has no {precision.gemm} there; use {offered}")


def _refuse_float8(precision: PrecisionSpec, model: ModelSpec, framework: FrameworkSpec) -> None:
    """Refuse what torchtitan itself refuses of Float8Linear (components/quantization/float8.py), or is not modelled."""
    if framework.fp8_all_gather and not precision.fp8_recipe:
        raise SpecError("fp8_all_gather: needs fp8 products; set precision.gemm: fp8-tensorwise")
    if framework.traits.has_one_shard_group and precision.fp8_recipe and (framework.compile or model.moe is not None):
        raise SpecError("fsdp1: fp8 is modelled for dense layers that are not compiled; leave compile out or use bf16")
    if not framework.traits.has_torchao or not precision.fp8_recipe:
        return
    if framework.fp8_all_gather and precision.fp8_recipe != "tensorwise":
        raise SpecError(
            f"fp8_all_gather: torchao gathers weights with one scale a tensor alone, not {precision.gemm}; use "
            "fp8-tensorwise"
        )
    if precision.fp8_recipe == "rowwise-gw-hp" and AUTO_FILTER in framework.fp8_filters:
        raise SpecError(f"fp8_filter ({AUTO_FILTER}): torchao has none for {precision.gemm}; leave it out")
    if not framework.compile:
        raise SpecError(f"{framework.name}: {precision.gemm} is modelled compiled alone; set framework.compile: true")
    if "output" not in framework.fp8_filters:
        raise SpecError(
            f"fp8_filter ({framework.fp8_filter}): the output layer is not compiled, and its fp8 is not modelled; add "
            "output"
        )
    if model.moe is not None or model.attention_kind.low_rank_widths(model.attention):
        raise SpecError(
            f"{framework.name}: {precision.gemm} is modelled for dense layers of grouped queries alone, and "
            f"{model.name} has others; use bf16 or megatron"
        )


def _refuse_kept_weights(model: ModelSpec, framework: FrameworkSpec) -> None:
    """Refuse FSDP that keeps parameters gathered where its groups are others than a block's."""
    if not framework.reshard_after_forward and (model.moe is not None or not framework.ends_apart):
        raise SpecError(
            f"{framework.name}: reshard_after_forward false is modelled for dense models with ends_apart alone; leave "
            "it out"
        )


def _refuse_fp8_switches(
    precision: PrecisionSpec, workload: WorkloadSpec, framework: FrameworkSpec, words: Sequence[str]
) -> None:
    """Refuse switches of fp8 products without them, and padding of the router where it has no use."""
    if framework.fp8_params and not precision.fp8_recipe:
        raise SpecError("fp8_params: Megatron-Core refuses it without fp8 products; set precision.gemm: fp8-delayed")
    if framework.router_padding and not precision.fp8_recipe:
        raise SpecError(
            "router_padding: Megatron-Core refuses it without fp8 products; leave it out or set precision.gemm: "
            "fp8-blockwise"
        )
    if framework.router_padding and (framework.dispatcher != "alltoall" or "deepep" in words):
        raise SpecError("router_padding: is modelled for the all-to-all dispatcher; use dispatcher: alltoall")
    if framework.router_padding and workload.routing.pad_to_capacity:
        raise SpecError(
            "router_padding: routing.pad_to_capacity gives every expert whole blocks of rows; leave one of them out"
        )


def _refuse_unlearned_positions(workload: WorkloadSpec) -> None:
    """Refuse sequences that are longer than the positions that a model learns."""
    rows, tokens = workload.model.max_positions, workload.batch.seq_len
    if workload.model.positions == "learned" and rows is not None and tokens > rows:
        raise SpecError(
            f"{workload.model.name}: learns {rows:,} positions (model.max_positions), and a sequence has {tokens:,} "
            "tokens; use shorter ones or give it more positions"
        )


def _refuse_capacity_beyond_tokens(workload: WorkloadSpec) -> None:
    """Refuse to pad experts to more rows than a rank has tokens: Megatron-Core's permutation cannot pick them
    (megatron_core 0.16.1, transformer/moe/moe_utils.py, ``permute``)."""
    routing, moe = workload.routing, workload.model.moe
    if moe is None or not routing.pad_to_capacity or routing.capacity_factor is None:
        return
    most = moe.num_experts / moe.top_k
    if routing.capacity_factor > most:
        raise SpecError(
            f"routing.pad_to_capacity: capacity_factor ({routing.capacity_factor:g}) gives an expert more rows than "
            f"a rank has tokens; use at most {most:g} ({moe.num_experts} experts over {moe.top_k} chosen)"
        )


def _refuse_attention(model: ModelSpec, framework: FrameworkSpec) -> None:
    """Refuse attention that the framework's kernels do not compute."""
    kind, primitives = model.attention_kind, primitives_of(framework)
    if any(getattr(primitives, name) is None for name in kind.primitives):
        raise SpecError(f"{framework.name}: {kind.title} is not modelled; use another framework")
    without_flash = not kind.megatron.has_flash or model.attention.sinks
    if framework.library and framework.attention == "flash" and without_flash:
        raise SpecError(
            "attention: flash: FlashAttention 2 has no sinks, and is not modelled for latent attention; use attention: "
            "fused"
        )
    if not framework.traits.has_windows and model.attention.window is not None:
        raise SpecError(f"{framework.name}: its attention has no windows; leave model.attention.window out")


def _refuse_software(cluster: ClusterSpec, framework: FrameworkSpec) -> None:
    """Refuse a framework that does not run on the GPU's software."""
    gpu = cluster.gpu
    if gpu.software == "rocm" and not framework.traits.runs_on_rocm:
        runs = ", ".join(name for name in FRAMEWORK_NAMES if TRAITS[name].runs_on_rocm)
        raise SpecError(f"{gpu.name}: {framework.name} does not run on ROCm; use one of {runs}")


def _with_optimizer(workload: WorkloadSpec, framework: FrameworkSpec) -> FrameworkSpec:
    """The framework with the optimizer's kernels that the job names."""
    if workload.optimizer.implementation is not None:
        offered = OFFERED[framework.name]["optimizer"]
        if workload.optimizer.implementation not in offered:
            asked = workload.optimizer.implementation
            raise SpecError(f"{framework.name}: optimizer.implementation ({asked}): use one of {', '.join(offered)}")
        framework = framework.model_copy(update={"optimizer": workload.optimizer.implementation})
    return framework


def _with_bf16_gradients(framework: FrameworkSpec) -> FrameworkSpec:
    """The framework with gradients that are added up and reduced in bf16 (``--grad-reduce-in-bf16``)."""
    options = {"grads": "bf16"}
    try:
        return FrameworkSpec.model_validate({**framework.model_dump(), **implied_facts(options), **options})
    except ValidationError:
        raise SpecError(
            f"--with bf16_grads: is an option of Megatron's main gradients, and {framework.name} has none; leave it out"
        ) from None


def with_offloaded_optimizer(framework: FrameworkSpec) -> FrameworkSpec:
    """The framework whose optimizer's states hosts hold and step, all of them where a run says no other share
    (``--with optimizer_offload``), with overlapped copies."""
    if framework.optimizer_offload:
        return framework
    options = {"optimizer_offload": 1.0, "overlap_optimizer_copies": True, "host_threads": THREADS_OF_WORD}
    try:
        return FrameworkSpec.model_validate({**framework.model_dump(), **options})
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SpecError(f"--with {OPTIMIZER_OFFLOAD}: {said}") from None


def with_offloaded_activations(model: ModelSpec, framework: FrameworkSpec) -> FrameworkSpec:
    """The framework with all of a model's modules on the host, or those that a run names
    (``--with activation_offload``)."""
    if framework.offloaded_activations.offloads_any:
        return framework
    try:
        options = {"activation_offload": "+".join(offloadable_modules_of_model(model))}
        return FrameworkSpec.model_validate({**framework.model_dump(), **options})
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SpecError(f"--with {ACTIVATION_OFFLOAD}: {said}") from None


def _with_words(workload: WorkloadSpec, framework: FrameworkSpec, words: Sequence[str]) -> FrameworkSpec:
    """The framework with what ``--with`` names of its options."""
    model = workload.model
    if "bf16_grads" in words:
        framework = _with_bf16_gradients(framework)
    if OPTIMIZER_OFFLOAD in words:
        framework = with_offloaded_optimizer(framework)
    if ACTIVATION_OFFLOAD in words:
        framework = with_offloaded_activations(model, framework)
    needing = [word for word in OF_EXPERTS if word in words]
    if model.moe is None and needing:
        raise SpecError(f"--with {needing[0]}: needs experts, and {model.name} has none; leave it out")
    if "deepep" in words:
        if "deepep" not in OFFERED[framework.name]["dispatcher"]:
            raise SpecError(f"--with deepep: needs megatron or torchtitan, not {framework.name}; use --framework")
        framework = framework.model_copy(update={"dispatcher": "deepep"})
    if "expert_overlap" in words:
        if framework.library is None or framework.experts != "grouped":
            raise SpecError(
                f"--with expert_overlap: needs megatron with grouped experts, not {framework.name} with "
                f"{framework.experts} ones; use --framework megatron"
            )
        framework = framework.model_copy(update={"expert_overlap": "combined", "delay_wgrad": True})
    if "moeblaze" in words:
        if not framework.traits.reads_rows_by_index or framework.experts != "grouped":
            raise SpecError(
                f"--with moeblaze: needs megatron with grouped experts, not {framework.name} with {framework.experts} "
                "ones; use --framework megatron"
            )
        framework = framework.model_copy(update={"routed_copies": "either"})
    if "early_stop" in words:
        if not framework.traits.has_pytorch_modules:
            raise SpecError(
                f"--with early_stop: is an option of PyTorch's own checkpoints, not of {framework.name}'s; use "
                "--framework torchtitan"
            )
        framework = framework.model_copy(update={"early_stop": True})
    return _with_graphs(workload, framework) if "cuda_graphs" in words else framework


def _with_graphs(workload: WorkloadSpec, framework: FrameworkSpec) -> FrameworkSpec:
    """The framework with Transformer Engine's CUDA graphs of all that they can hold of the model's layers, whole ones
    where nobody waits for experts' numbers of rows; those that the user chose stay."""
    if framework.library is None:
        raise SpecError(
            f"--with cuda_graphs: is modelled for megatron, not for {framework.name}; use --framework megatron"
        )
    if framework.graphs.captures_any:
        return framework
    dense = "+mlp" if workload.model.num_dense_layers else ""
    holds_all = workload.model.moe is None or workload.routing.pad_to_capacity
    graphs = "te" if holds_all else f"te:attn{dense}+moe_router+moe_preprocess"
    return framework.model_copy(update={"cuda_graphs": graphs})


def routing_loads_by_ep(workload: WorkloadSpec, table: StrategyTable) -> RoutingLoads:
    """The routing load of every expert-parallel degree of a table."""
    if workload.model.moe is None:
        if workload.routing.kind != "balanced":
            kind, name = workload.routing.kind, workload.model.name
            raise SpecError(f"routing.kind ({kind}) needs experts, and {name} has none; leave routing out")
        return RoutingLoads({}, {})
    degrees = sorted(e for e in set(table.ep.tolist()) if workload.model.moe.num_experts % e == 0)
    loads = routing_loads(workload.routing, workload.model, degrees)
    balanced = sorted(set(table.ep[table.balancing > 0].tolist()) & set(degrees))
    return loads_with_token_scheduling(loads, workload.routing, workload.model, balanced) if balanced else loads
