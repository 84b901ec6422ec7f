"""Notes of a plan on its fp8 products: how the format was read, which rates stand in, what they need."""

from __future__ import annotations

from mofa.blocks.fp8 import FP8_RECIPES, formats_of_layer_products
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import OLD_FP8, WorkloadSpec


def fp8_notes(workload: WorkloadSpec, cluster: ClusterSpec) -> tuple[str, ...]:
    """Notes on how the old spelling is read, on rates that stand in for unmeasured kernels, and on the CUDA needed."""
    recipe = workload.precision.fp8_recipe
    old = (
        "precision.gemm: fp8 is read as fp8-delayed, Megatron-Core's default recipe and what it stood for; say "
        "fp8-delayed, fp8-tensorwise or fp8-blockwise"
    )
    curves = cluster.gpu.curves
    missing = [name for name in formats_of_layer_products(recipe) if name not in curves.gemm] if recipe else []
    stand_in = (
        f"fp8 products as Transformer Engine runs them ({', '.join(missing)}) were not measured on "
        f"{cluster.gpu.name}: PyTorch's scaled product stands in"
    )
    cuda = FP8_RECIPES[recipe].min_cuda_version if recipe else ""
    needs = f"fp8-{recipe} needs CUDA {cuda} or later, below which Transformer Engine refuses it: assumed to be there"
    said = {old: workload.precision.gemm == OLD_FP8, stand_in: bool(missing), needs: bool(cuda)}
    return tuple(note for note, applies in said.items() if applies)
