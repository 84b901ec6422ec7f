"""The shapes of every family: a grid to fit on, and held-out ones from the bundled workloads under TP 1 to 8."""

from __future__ import annotations

from mofa.calibrate.cases import Case
from mofa.calibrate.shapes.attention_kernels import attention_cases
from mofa.calibrate.shapes.clock_speed import sustained_cases, throttled_cases
from mofa.calibrate.shapes.collective import HELD_MULTIPROCESSORS, LAYERS_BESIDE, held_multiprocessor_cases
from mofa.calibrate.shapes.gemms import gemm_cases, grouped_product_cases, unaligned_product_cases
from mofa.calibrate.shapes.host_ops import (
    HOST_OPTIMIZER,
    autograd_host_cases,
    host_issue_cases,
    host_optimizer_cases,
    op_sequence_host_cases,
)
from mofa.calibrate.shapes.memory_bound import compiled_memory_bound_cases, copy_cases, eager_memory_bound_cases
from mofa.calibrate.shapes.routed import routed_cases
from mofa.calibrate.shapes.te_bf16 import (
    TE_BF16_FAMILIES,
    te_attention_cases,
    te_expert_host_cases,
    te_grouped_product_cases,
    te_memory_bound_cases,
    te_weight_gradient_cases,
)
from mofa.calibrate.shapes.te_fp8 import FAMILIES as TE_FAMILIES
from mofa.calibrate.shapes.te_fp8 import te_fp8_cases
from mofa.calibrate.shapes.te_throttled import FAMILY as TE_THROTTLED
from mofa.calibrate.shapes.te_throttled import te_throttled_cases

MIN_POINTS = 5
"""Rows of a kind that a fit needs. [-]"""
QUICK_COMPILED = ("rmsnorm_fwd", "swiglu_fwd", "residual_add")
QUICK_SUSTAINED = (("gemm", "bf16", 8192, 8192), ("gemm", "fp8", 8192, 8192), ("attention_flash", "bf16", 8192, 4096),
                   ("attention_cudnn", "bf16", 8192, 4096), ("attention_cudnn_bwd", "bf16", 8192, 4096))  # fmt: skip
QUICK_LAYERS = tuple((tokens, hidden) for tokens, hidden, _ in LAYERS_BESIDE[:3:2])
"""Two that take little: 8 and 14 ms on an H200."""
ONE_GPU_FAMILIES = ("gemm", "grouped_gemm", "attention", "memory_bound", "compiled", "copy", "host", "autograd",
                    "routed", "sustained", "throttled", "sequence", "unaligned_gemm", HELD_MULTIPROCESSORS)  # fmt: skip
COLLECTIVE_FAMILIES = ("collective", "overlap", "dependent_collective")
SEVERAL_GPU_FAMILIES = (*ONE_GPU_FAMILIES, *COLLECTIVE_FAMILIES)
FAMILIES = (*SEVERAL_GPU_FAMILIES, *TE_FAMILIES, *TE_BF16_FAMILIES, TE_THROTTLED, "chunked_moe", HOST_OPTIMIZER)
"""What can be named. Only where they are named are measured whole layers, as no curve comes from them, what needs
Transformer Engine on the machine, and an optimizer on the host."""


def all_cases_of_family(
    family: str, *, quick: bool = False, full: bool = True, gpus: int = 1, fresh: bool = False
) -> list[Case]:
    """All cases of a family, in the order in which they are measured; ``quick`` a quarter, else half of the grid.

    ``fresh`` adds the second held-out set. ``gpus`` 0 is a host without any.
    """
    made = {
        "gemm": gemm_cases, "grouped_gemm": grouped_product_cases, "attention": attention_cases,
        "memory_bound": eager_memory_bound_cases, "compiled": compiled_memory_bound_cases, "copy": copy_cases,
        "host": host_issue_cases, "autograd": autograd_host_cases, "routed": routed_cases, "sustained": sustained_cases,
        "sequence": op_sequence_host_cases,
        "unaligned_gemm": unaligned_product_cases, "te_experts": te_grouped_product_cases,
        "te_attention": te_attention_cases,
        "te_wgrad": te_weight_gradient_cases, "te_expert_host": te_expert_host_cases, "te_ops": te_memory_bound_cases,
        "throttled": throttled_cases, TE_THROTTLED: te_throttled_cases,
        HOST_OPTIMIZER: host_optimizer_cases, HELD_MULTIPROCESSORS: held_multiprocessor_cases,
    }  # fmt: skip
    if family == "chunked_moe":
        from mofa.calibrate.shapes.chunked import chunked_layer_cases

        return [c for c in chunked_layer_cases(gpus) if fresh or c.split != "fresh"]
    if family in TE_FAMILIES:
        return te_fp8_cases(family)
    if family in COLLECTIVE_FAMILIES:
        from mofa.calibrate.shapes.collective import collective_cases, dependent_collective_cases, overlap_cases

        made_for = {
            "collective": collective_cases,
            "overlap": overlap_cases,
            "dependent_collective": dependent_collective_cases,
        }
        cases = made_for[family](gpus)
    else:
        cases = made[family]()
    cases = cases if fresh else [c for c in cases if c.split != "fresh"]
    if quick:
        return _quick(family, cases)
    if (
        family
        in (
            "host",
            "autograd",
            "sequence",
            "copy",
            "sustained",
            "throttled",
            TE_THROTTLED,
            "overlap",
            "dependent_collective",
            HELD_MULTIPROCESSORS,
            HOST_OPTIMIZER,
            *TE_BF16_FAMILIES,
        )
        or full
    ):
        return cases
    return _grid(cases)[::2] + [c for c in cases if c.split != "grid"]


def _grid(all_cases: list[Case]) -> list[Case]:
    return [c for c in all_cases if c.split == "grid"]


def _quick(family: str, all_cases: list[Case]) -> list[Case]:
    """A quarter; of what is fitted op by op as many of each as a fit needs; of what takes seconds each a few."""
    if family in ("host", "copy", "overlap"):
        return all_cases
    if family in (
        "autograd",
        "sequence",
        "routed",
        "throttled",
        TE_THROTTLED,
        "unaligned_gemm",
        HOST_OPTIMIZER,
        *TE_BF16_FAMILIES,
    ):
        return []
    if family == "sustained":
        return [c for c in all_cases if (c.op, c.dtype, c.shape_size("m"), c.shape_size("n")) in QUICK_SUSTAINED]
    if family == "compiled":
        return _thin([c for c in _grid(all_cases) if c.op in QUICK_COMPILED])
    if family == HELD_MULTIPROCESSORS:
        return [c for c in all_cases if c.op == "spin" and (c.shape_size("m"), c.shape_size("n")) in QUICK_LAYERS]
    held_out = [c for c in all_cases if c.split != "grid"][::4]
    if family == "memory_bound":
        return _thin(_grid(all_cases)) + held_out
    if family == "attention":
        return [c for c in _grid(all_cases) if c.shape_size("q") <= 32768][::4] + held_out
    return _grid(all_cases)[::4] + held_out


def _thin(all_cases: list[Case]) -> list[Case]:
    """The fewest of each op that a fit takes, from the smallest to the largest."""
    by_op: dict[str, list[Case]] = {}
    for case in all_cases:
        by_op.setdefault(case.op, []).append(case)
    thinned = []
    for of_op in by_op.values():
        last, num = len(of_op) - 1, min(MIN_POINTS, len(of_op))
        thinned += [of_op[round(i * last / max(1, num - 1))] for i in range(num)]
    return thinned
