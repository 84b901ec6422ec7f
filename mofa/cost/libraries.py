"""Which part of a step rests on kernels and hosts that were measured under a library of layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from mofa.blocks.build import layer_kind
from mofa.blocks.op import Op
from mofa.blocks.tapes import kept_layer_label, layer_label
from mofa.blocks.work import Attention, Gemm, GroupedGemm, MemoryBound
from mofa.cost.block.costs import BlockCosts
from mofa.cost.block.durations import OpTimingMachine, device_seconds, kernel_curve
from mofa.specs.base import Fact, Library, Spec
from mofa.specs.curves import FittedCurve
from mofa.specs.model import ModelSpec

AS_THE_KERNELS = ("recompute", "bubble", "stragglers")
"""Components that are made of the kernels of all others."""


def step_fractions_on_layer_library(
    costs: BlockCosts, model: ModelSpec, exposed: Mapping[str, float], library: Library
) -> dict[str, float]:
    """Fraction of the step that rests on what was measured under a library, by component; none where nothing does. [-]

    Of a component counts the share of its seconds that ops take whose curve was measured so: forward and backward, of
    all layers, the embedding and the head. The host's wait counts where times of the library's calls are among the
    host's facts. Communication and the optimizer count not: their curves name no library.

    Parameters
    ----------
    costs, model
        Of one candidate, with its tapes and what times them; its model.
    exposed
        The parts of the step. [s]
    library
        Whose curves count.
    """
    by_family: dict[str, float] = defaultdict(float)
    under: dict[str, float] = defaultdict(float)
    machine = costs.machine
    kinds = Counter(layer_kind(model, i) for i in range(model.num_layers))
    layers = {layer_label(kind, spec): number for kind, number in kinds.items() for spec in costs.blocks}
    of_keeping_layers = {kept_layer_label(name) for name in layers}  # which are counted under their plain labels
    for name, block in costs.tapes.items():
        if name in of_keeping_layers:
            continue
        for tape in (block.forward, block.backward):
            for op, took in zip(tape.ops, device_seconds(tape.ops, machine), strict=True):
                if isinstance(op.work, (Gemm, GroupedGemm, Attention, MemoryBound)):
                    seconds = layers.get(name, 1) * float(took)
                    by_family[op.family] += seconds
                    under[op.family] += seconds * _is_measured_under(op, machine, library)
    shares = {family: under[family] / by_family[family] for family in by_family if by_family[family] > 0}
    kernels_s = sum(by_family.values())
    for name in AS_THE_KERNELS:
        shares[name] = sum(under.values()) / kernels_s if kernels_s else 0.0
    shares["host_idle"] = float(has_host_facts_of_library(machine.cluster.gpu.curves.host, library))
    step_s = sum(exposed.values())
    step_shares = {name: shares.get(name, 0.0) * seconds / step_s for name, seconds in exposed.items()}
    return {name: share for name, share in step_shares.items() if share > 0}


def _is_measured_under(op: Op, machine: OpTimingMachine, library: Library) -> bool:
    curve = kernel_curve(op, machine)
    return isinstance(curve, FittedCurve) and curve.library == library and curve.provenance == "measured"


def has_host_facts_of_library(host: Spec, library: Library) -> bool:
    """Whether times of a library's calls, measured on this kind of host, are among a host's facts."""
    return any(fact.library == library and fact.provenance == "measured" for fact in _facts(host))


def _facts(item: object) -> Iterable[Fact]:
    """The facts of a record, and of the records in it."""
    if isinstance(item, Fact):
        yield item
    elif isinstance(item, BaseModel):
        for name in type(item).model_fields:
            yield from _facts(getattr(item, name))
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _facts(value)
    elif isinstance(item, (tuple, list)):
        for value in item:
            yield from _facts(value)
