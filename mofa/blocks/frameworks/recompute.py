"""What a strategy's recomputation means in each framework: which ops are not kept, and what a framework refuses."""

from __future__ import annotations

from mofa.blocks.frameworks.torchtitan.layer import ops_with_saved_outputs
from mofa.blocks.op import Tape
from mofa.blocks.recomputation import NO_RECOMPUTE, Recompute
from mofa.specs.activation_offload import why_recomputation_conflicts
from mofa.specs.attention import ATTENTION_KINDS, MODULES_OF_ATTENTION
from mofa.specs.framework import FrameworkSpec
from mofa.specs.model import ModelSpec
from mofa.specs.shared_facts import load_shared_facts
from mofa.specs.strategy import RECOMPUTE_MODULES, RecomputeSpec

# Megatron's modules: a checkpoint keeps what enters the region and what leaves it
CHECKPOINTED = {"core_attn": "core_attn", "mlp": "mlp", "moe": "moe", "shared_experts": "moe.shared"}
# and its output-discarding checkpoints give up what leaves the region as well; each norm is a checkpoint of its own
DISCARDED = {
    "moe_act": ("moe.moe_act",),
    "layernorm": ("layernorm.attn_norm", "layernorm.mlp_norm"),
    **MODULES_OF_ATTENTION,
}


def recompute_of_layer(
    framework: FrameworkSpec, spec: RecomputeSpec, forward: Tape | None, model: ModelSpec
) -> Recompute:
    """What a layer recomputes in its backward tape, of a strategy's choice of it.

    Which layers are (``full:n``, ``every:n``) is the caller's choice. ``forward`` is needed for ``ops``, which picks
    ops by what they are. Call it only where :func:`why_recomputation_unsupported` finds nothing.

    Examples
    --------
    >>> sorted(CHECKPOINTED)
    ['core_attn', 'mlp', 'moe', 'shared_experts']
    """
    if spec.kind == "none":
        return NO_RECOMPUTE
    if spec.kind == "selective":
        within = {"shared_experts"} if "moe" in spec.modules else set()  # their checkpoint is inside the layer's
        return Recompute(
            kind="regions",
            checkpoint=frozenset(CHECKPOINTED[m] for m in spec.modules if m in CHECKPOINTED and m not in within),
            discard=frozenset(region for m in spec.modules for region in DISCARDED.get(m, ())),
            reentrant=True,
        )
    if not framework.traits.has_pytorch_modules:
        return Recompute(
            kind="full", reentrant=True
        )  # CheckpointFunction repeats the whole layer (tensor_parallel/random.py)
    # non-reentrant. A compiler drops what is unused of a block that is one graph; around experts, where only parts of
    # the block are compiled, the checkpoint is eager
    parted = forward is not None and any(op.part == "experts" for op in forward.ops)
    early_stop = framework.early_stop or (framework.compile and not parted)
    if spec.kind == "ops":
        assert forward is not None, "recompute: ops picks ops from the forward tape"
        compiled = framework.compile and parted
        saved_outputs = ops_with_saved_outputs(
            forward, model, attention=framework.saves_attention, products=not compiled
        )
        return Recompute(kind="full", keep_outputs=saved_outputs, early_stop=early_stop)
    return Recompute(kind="full", early_stop=early_stop)


DISCARDED_FP8 = ("moe_act", "layernorm")
"""Modules that Megatron-Core refuses to recompute under delayed scaling (transformer_config.py)."""


def why_recomputation_unsupported(
    framework: FrameworkSpec, spec: RecomputeSpec, model: ModelSpec, fp8_recipe: str = ""
) -> str | None:  # fmt: skip
    """Why a framework cannot recompute so, or None; ``fp8_recipe`` is how its fp8 products are scaled, if any are."""
    if spec.token_chunks > 1 and (
        model.moe is None or framework.name != "megatron" or framework.dispatcher == "deepep"
    ):
        return (
            f"token_chunks ({spec.token_chunks}) needs experts and framework megatron without deepep, "
            f"not {model.name} on {framework.name} with {framework.dispatcher}; leave token_chunks out"
        )
    latent = model.attention_kind.megatron.has_latents
    if why := why_recomputation_conflicts(
        framework.activation_offload, spec.kind, spec.modules, latent=latent, token_chunks=spec.token_chunks
    ):
        return why
    titan = framework.traits.has_pytorch_modules
    if spec.kind in ("ops", "every") and framework.name != "torchtitan":
        return f"recompute: {spec.kind} is torchtitan's; {framework.name} has none, selective[:modules] and full[:n]"
    if spec.kind == "full" and spec.layers is not None and titan:
        return f"recompute: full:n is Megatron's; {framework.name} has none and full without n"
    if spec.kind != "selective":
        return None
    if titan:
        return "recompute: selective modules are Megatron's; torchtitan has none, ops, every:n and full"
    if fp8_recipe == "delayed" and (refused := [m for m in spec.modules if m in DISCARDED_FP8]):
        # "Delayed scaling does not support moe_act and layernorm recompute for fp8." (transformer_config.py)
        return (
            f"recompute: Megatron-Core refuses module {' and '.join(refused)} with delayed scaling; "
            "use precision.gemm: fp8-tensorwise or fp8-blockwise, or leave the module out"
        )
    return next((text for m in spec.modules if (text := _module_unsupported(framework, m, model))), None)


def largest_step_share_saved_by_recomputing(framework: FrameworkSpec) -> float:
    """Largest share of its time that a framework's step may save by recomputing something. [-]"""
    tolerances, pairs = load_shared_facts().tolerances, framework.expert_overlap == "combined"
    return (tolerances.recomputing_shortens_pairs if pairs else tolerances.recomputing_shortens).value


def selective_modes_to_search(
    framework: FrameworkSpec, model: ModelSpec, fp8_recipe: str = ""
) -> tuple[RecomputeSpec, ...]:
    """The sets of modules that a search recomputes: those that no other set beats in time and memory at once.

    A second saves the most memory in ``moe_act``, then ``mla_up_proj``, ``layernorm``, ``shared_experts``, and the
    least in ``moe`` (docs/evidence/search.md#sets-of-modules). Sets that have a later one without an earlier one are
    beaten but for ``mla_up_proj`` alone, which saves the most. What is inside ``moe`` saves nothing beside it. ``mlp``
    of a model with experts is of the few dense layers: it goes with the largest sets.

    Modules that save nothing are left out (:func:`why_recomputing_module_saves_nothing`).

    Examples
    --------
    >>> from mofa.specs.load import load_framework, load_workload
    >>> [spec.text for spec in selective_modes_to_search(load_framework("megatron"), load_workload("llama3-8b").model)]
    ['selective:mlp']
    """
    offered = [
        module for module in RECOMPUTE_MODULES
        if why_recomputing_module_saves_nothing(framework, module, model) is None
        and why_recomputation_unsupported(framework, RecomputeSpec(kind="selective", modules=(module,)), model,
        fp8_recipe) is None
    ]  # fmt: skip
    together = [module for module in offered if module not in ("moe", "shared_experts")]
    alone = [module for module in offered if module not in ("layernorm", "shared_experts")]
    if model.moe is not None:
        alone = [module for module in alone if module != "mlp"]
    pairs = (("moe_act", "layernorm"), ("moe_act", "mla_up_proj"))
    sets = [*((module,) for module in alone), *(pair for pair in pairs if set(pair) <= set(offered)), together]
    if "shared_experts" in offered:
        sets.append([*together, "shared_experts"])
    chosen = dict.fromkeys(tuple(sorted(modules)) for modules in sets if modules)
    return tuple(RecomputeSpec(kind="selective", modules=modules) for modules in chosen)


def why_recomputing_module_saves_nothing(framework: FrameworkSpec, module: str, model: ModelSpec) -> str | None:
    """Why recomputing a module saves no memory, or None where it does.

    A fused kernel of attention keeps its inputs, and its output is the output projection's input. Transformer Engine's
    norm is part of the linear behind it, which keeps its input; before experts and latents it is a module of its own.
    """
    if module == "core_attn" and framework.attention != "unfused":
        return "recompute: module core_attn saves nothing, as fused attention keeps its inputs and its output anyway"
    if module == "layernorm" and model.moe is None and not model.attention_kind.megatron.has_latents:
        return "recompute: module layernorm saves nothing, as norms are part of the linears behind them"
    return None


def _module_unsupported(framework: FrameworkSpec, module: str, model: ModelSpec) -> str | None:
    if module in ("moe", "moe_act") and model.moe is None:
        return f"recompute: module {module} needs experts, {model.name} has none"
    if module == "shared_experts" and (model.moe is None or not model.moe.shared_hidden):
        return f"recompute: module shared_experts needs shared experts, {model.name} has none"
    if module in MODULES_OF_ATTENTION and module not in model.attention_kind.recompute_modules:
        owner = next(kind.title for kind in ATTENTION_KINDS.values() if module in kind.recompute_modules)
        return f"recompute: module {module} needs {owner}, {model.name} has none"
    if module == "mlp" and not model.num_dense_layers:
        return f"recompute: module mlp needs dense layers, {model.name} has none"
    if module == "mlp" and model.mlp.bias:
        # the checkpointed MLP hands out its bias, a parameter, as an output (transformer_layer.py:733, mlp.py):
        # autograd makes the checkpoint its origin, whose backward is then led to itself (tensor_parallel/random.py:566)
        return (
            f"recompute: module mlp of MLPs with biases never ends in Megatron-Core, and {model.name} has them "
            "(model.mlp.bias); use another module or full"
        )
    if framework.name == "megatron-2022" and module != "core_attn":
        return f"recompute: module {module} is newer than megatron-2022, which has core_attn; use selective or full"
    if module == "moe_act" and framework.experts != "grouped":
        return "recompute: module moe_act needs grouped experts (framework.experts: grouped)"
    if framework.owner_of_layer_modules == "megatron" and module in ("layernorm", "moe_act"):
        # CheckpointWithoutOutput asks Transformer Engine for its fp8 state unless told not to (random.py:588-592)
        return f"recompute: module {module} needs Transformer Engine, which {framework.name} runs without"
    return None
