"""Notes of a plan on facts that were measured on another GPU than its own."""

from __future__ import annotations

from collections.abc import Sequence

from mofa.blocks.elementwise import any_true
from mofa.blocks.op import Tape
from mofa.blocks.work import Gemm
from mofa.cost.optimizer import optimizer_rates_16_bit_over_fp32, optimizer_steps_in_16_bit
from mofa.cost.provenance import is_unaligned_product, weakest_provenance
from mofa.specs.base import Fact
from mofa.specs.framework import FrameworkSpec
from mofa.specs.gpu_facts import facts_of_gpu_record
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec


def borrowed_fact_notes(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, tapes: Sequence[Tape], precision: str
) -> tuple[str, ...]:
    """Notes on the facts of :mod:`mofa.specs.gpu_facts` that a plan uses and its GPU's profile does not call
    measured."""
    curves, borrowed = cluster.gpu.curves, dict[str, list[Fact]]()
    works = [op.work for tape in tapes for op in tape.ops if type(op.work) is Gemm]
    if any(is_unaligned_product(work) for work in works):
        borrowed["unaligned_products"] = facts_of_gpu_record(curves.unaligned_products)
    if optimizer_steps_in_16_bit(workload, framework, precision):
        borrowed["optimizer_16_bit"] = list(optimizer_rates_16_bit_over_fp32(framework, cluster.gpu).values())
    if any(any_true(op.kernel_loads > 0.0) for tape in tapes for op in tape.ops):
        borrowed["kernel_selection"] = facts_of_gpu_record(curves.kernel_selection)
    kinds = {name: weakest_provenance(*facts) for name, facts in borrowed.items()}
    return tuple(
        f"{name.replace('_', ' ')}: {kind} for {cluster.gpu.name}, as measured on another GPU (curves.{name})"
        for name, kind in kinds.items() if kind in ("transferred", "assumed")
    )  # fmt: skip
