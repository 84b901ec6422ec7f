"""Notes of a plan on its fp8 products: how the format was read, which rates stand in, what they need."""

from __future__ import annotations

from mofa.blocks.fp8 import FP8_RECIPES, formats_of_layer_products, transformer_engine_recipe
from mofa.blocks.work import Format
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.products import known_or_stand_in_format
from mofa.specs.workload import OLD_FP8, WorkloadSpec


def _stand_ins(missing: list[Format], cluster: ClusterSpec) -> str:
    """What is multiplied at the rate of what."""
    known = {known_or_stand_in_format(name, cluster.gpu.curves.gemm) for name in missing}
    if {"fp8_rows", "fp8_rows_hp"} & {*missing}:
        return f"those with one scale a tensor ({', '.join(sorted(known))}) stand in"
    if known <= {"fp8"}:
        return "PyTorch's scaled product stands in"
    return f"those with one scale a tensor ({', '.join(sorted(known))}) and casts of 1 x 128 blocks stand in"


def fp8_notes(workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec) -> tuple[str, ...]:
    """Notes on how the old spelling is read, on rates that stand in for unmeasured kernels, and on the CUDA needed."""
    recipe = workload.precision.fp8_recipe
    old = (
        "precision.gemm: fp8 is read as fp8-delayed, Megatron-Core's default recipe and what it stood for; say "
        "fp8-delayed, fp8-tensorwise, fp8-blockwise or fp8-mxfp8"
    )
    curves = cluster.gpu.curves
    missing = [name for name in formats_of_layer_products(recipe) if name not in curves.gemm] if recipe else []
    library = "torchao" if framework.traits.has_torchao else "Transformer Engine"
    stand_in = (
        f"fp8 products as {library} runs them ({', '.join(missing)}) were not measured on "
        f"{cluster.gpu.name}: {_stand_ins(missing, cluster)}"
    )
    cuda = FP8_RECIPES[recipe].min_cuda_version if transformer_engine_recipe(workload, framework) else ""
    needs = f"fp8-{recipe} needs CUDA {cuda} or later, below which Transformer Engine refuses it: assumed to be there"
    said = {old: workload.precision.gemm == OLD_FP8, stand_in: bool(missing), needs: bool(cuda)}
    return tuple(note for note, applies in said.items() if applies)
