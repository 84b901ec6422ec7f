"""Megatron's fine-grained offload of activations: which modules' inputs go to the host's memory until their backward.

Megatron-Core 0.16.1, core/pipeline_parallel/fine_grained_activation_offload.py and transformer/transformer_config.py
(``fine_grained_activation_offloading``, ``offload_modules``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self, cast

from pydantic import AfterValidator

from mofa.errors import SpecError
from mofa.specs.model import ModelSpec

ACTIVATION_OFFLOAD = "activation_offload"
"""The option, and the word of ``--with`` that sets it."""
OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
MODULES: tuple[OffloadModule, ...] = (
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act",
)  # fmt: skip
"""In the order of a layer's forward."""
OF_EXPERTS: tuple[OffloadModule, ...] = ("mlp_norm", "expert_fc1", "moe_act")
"""Modules that layers without experts lack: their second norm is part of the linear behind it (gpt_layer_specs.py)."""
MIN_ELEMENTS = 1024 * 1024
"""Smaller tensors stay on the device: ``min_offloaded_tensor_size`` as Megatron-Core 0.16.1 has it by default. [-]"""
HOW = f"use none, or modules of {'+'.join(MODULES)}"


@dataclass(frozen=True)
class ActivationOffload:
    """Modules of a layer whose saved tensors are copied to the host behind their forward and back ahead of their
    backward.

    >>> str(ActivationOffload.parse("attn_proj+core_attn")), ActivationOffload.parse("none").offloads_any
    ('core_attn+attn_proj', False)
    """

    modules: tuple[OffloadModule, ...] = ()
    """In the order of :data:`MODULES`."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Modules out of their text.

        Raises
        ------
        ValueError
            If Megatron-Core offloads no such module (transformer_config.py:1282), or not alone (1287).
        """
        named = [] if text == "none" else text.split("+")
        unknown = [module for module in named if module not in MODULES]
        if unknown:
            raise ValueError(f"activation_offload ({text}): {unknown[0] or 'nothing'} is no module of it; {HOW}")
        if len(set(named)) < len(named):
            raise ValueError(f"activation_offload ({text}) names a module twice; name each once")
        if "attn_proj" in named and "core_attn" not in named:
            raise ValueError(
                f"activation_offload ({text}): attn_proj's input is the output of core_attn, whose backward needs it; "
                "add core_attn"
            )
        return cls(cast("tuple[OffloadModule, ...]", tuple(module for module in MODULES if module in named)))

    def __str__(self) -> str:
        return "+".join(self.modules) or "none"

    @property
    def offloads_any(self) -> bool:
        """Whether anything is offloaded."""
        return bool(self.modules)


def _as_written(text: str) -> str:
    return str(ActivationOffload.parse(text))


ActivationOffloadText = Annotated[str, AfterValidator(_as_written)]
"""The text of :class:`ActivationOffload`, its modules in order."""


def check_activation_offload(
    name: str, offload: str, experts: str, *, on_engine: bool, has_graphs: bool, overlaps_experts: bool
) -> None:
    """Refuse what cannot be with offloaded activations, whatever the strategy is.

    ``on_engine`` says whether layers are Transformer Engine's.

    Raises
    ------
    ValueError
        If another framework has the option (Megatron-LM core_v0.16.1, training/arguments.py asks for Transformer
        Engine), or another option is set that is not modelled with it.
    """
    modules = ActivationOffload.parse(offload).modules
    if not modules:
        return
    if not on_engine:
        raise ValueError(f"activation_offload ({offload}) is an option of megatron, not of {name}; leave it out")
    grouped = [module for module in ("expert_fc1", "moe_act") if module in modules]
    if grouped and experts != "grouped":  # moe/experts.py: TEGroupedMLP alone has them
        raise ValueError(
            f"activation_offload ({offload}): {grouped[0]} is of grouped experts, not of {experts} ones; use grouped"
        )
    if has_graphs:
        raise ValueError(f"activation_offload ({offload}) is not modelled with cuda_graphs; leave one out")
    if overlaps_experts:
        raise ValueError(
            f"activation_offload ({offload}) is not modelled with expert_overlap or shared_expert_overlap; leave one "
            "out"
        )


def offloadable_modules_of_model(model: ModelSpec) -> tuple[OffloadModule, ...]:
    """Modules that layers of a model have as Transformer Engine's layer specs build them (gpt_layer_specs.py): a norm
    is one before experts and before latent attention alone.

    >>> from mofa.specs.load import load_workload
    >>> "+".join(offloadable_modules_of_model(load_workload("llama3-8b").model))
    'qkv_linear+core_attn+attn_proj'
    """
    lacking: set[OffloadModule] = set()
    if model.moe is None:
        lacking.update(OF_EXPERTS)
    if not model.attention_kind.megatron.norm_is_module:
        lacking.add("attn_norm")
    return tuple(module for module in MODULES if module not in lacking)


def refuse_absent_modules(model: ModelSpec, offload: str) -> None:
    """Refuse modules that a model lacks, whose offload would change nothing.

    Raises
    ------
    SpecError
        With the module's name.
    """
    has = offloadable_modules_of_model(model)
    for module in ActivationOffload.parse(offload).modules:
        if module not in has:
            needs = "experts" if module in OF_EXPERTS else "latent attention, ahead of which a norm is a module"
            raise SpecError(f"activation_offload: {module} needs {needs}, and {model.name} has none; leave it out")


def why_recomputation_conflicts(
    offload: str, kind: str, modules: tuple[str, ...], *, latent: bool, token_chunks: int
) -> str:
    """Why layers cannot be recomputed so with offloaded activations; empty where they can.

    Parameters
    ----------
    kind, modules
        Of the recomputation.
    latent
        Whether attention is latent: a norm and up-projections are then inside the queries' module.

    Notes
    -----
    No assert of Megatron-Core 0.16.1 says so. A checkpointed ``core_attn`` opens no group of tensors, and the end of
    one that was not opened fails (``should_bulk_offload``). What is recomputed in front of a group's wait for its
    copies reads them unawaited. A layer that is recomputed whole passes its groups twice.
    """
    offloaded = ActivationOffload.parse(offload).modules
    if not offloaded:
        return ""
    said = f"activation_offload ({offload})"
    if token_chunks > 1:
        return f"{said} is not modelled with token_chunks ({token_chunks}); leave one out"
    if kind not in ("none", "selective"):
        return f"{said} is not modelled with recompute: {kind}; use none or selective"
    inside = (
        ("core_attn", ("core_attn", "attn_proj"), True), ("moe", ("expert_fc1", "moe_act"), True),
        ("mla_up_proj", ("qkv_linear",), latent), ("layernorm", ("qkv_linear",), latent),
    )  # fmt: skip
    for module, groups, there in inside:
        both = [group for group in groups if group in offloaded]
        if there and module in modules and both:
            return f"{said}: {both[0]} cannot be with recompute of the module {module}; leave one out"
    return ""
