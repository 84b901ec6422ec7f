"""Megatron-LM's arguments about activations that go to the host, and the environment that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mofa.export.arguments import Argument, FieldRow, GivenArguments
from mofa.export.job import ExportJob
from mofa.specs.activation_offload import MIN_ELEMENTS, ActivationOffload

OFFLOADS = Argument("fine-grained-activation-offloading", "flag", False)
MODULES = Argument("offload-modules", "texts", [])
SMALLEST = Argument("min-offloaded-tensor-size", "int", MIN_ELEMENTS)
FIRST_VERSION = Argument("$NVTE_CPU_OFFLOAD_V1", "text", "0")


def _write(job: ExportJob) -> Mapping[str, Any]:
    """The modules, with the variable that Megatron-LM asserts under Transformer Engine 2.10 and above."""
    offload = job.framework.offloaded_activations
    if not offload.offloads_any:
        return {}
    return {OFFLOADS.name: True, MODULES.name: list(offload.modules), FIRST_VERSION.name: "1"}


def _read(given: GivenArguments) -> Mapping[str, Any]:
    if not given[OFFLOADS.name]:
        return {}
    if given[SMALLEST.name] != MIN_ELEMENTS:
        raise given.refusal(
            f"{SMALLEST.name} ({given[SMALLEST.name]}) is not modelled", f"what is: {MIN_ELEMENTS} elements"
        )
    if FIRST_VERSION.name in given and given[FIRST_VERSION.name] != "1":
        raise given.refusal(
            f"{FIRST_VERSION.name} ({given[FIRST_VERSION.name]}) is not 1",
            f"Megatron-LM refuses {OFFLOADS.name} with it under Transformer Engine 2.10 and above; set it to 1",
        )
    modules = [part for text in given[MODULES.name] or [] for part in str(text).replace(",", " ").split()]
    if not modules:
        raise given.refusal(f"{OFFLOADS.name} is given without {MODULES.name}", "Megatron-Core refuses it; name some")
    try:
        return {"framework.activation_offload": str(ActivationOffload.parse("+".join(modules)))}
    except ValueError as error:
        raise given.refusal(f"{MODULES.name} ({' '.join(modules)})", str(error)) from None


OFFLOAD_ROWS: tuple[FieldRow, ...] = (
    FieldRow(("framework.activation_offload",), (OFFLOADS, MODULES, SMALLEST, FIRST_VERSION), _write, _read),
)
