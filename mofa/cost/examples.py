"""A toy GPU with round numbers, for doctests and tests that are checked by hand."""

from __future__ import annotations

from typing import Any

from mofa.specs.hardware import GpuSpec


def _fact(value: object) -> dict[str, Any]:
    return {"value": value, "provenance": "assumed", "source": "a round number for examples"}


def toy_gpu() -> GpuSpec:
    """1000 TFLOP/s at 80 % sustained, 128 multiprocessors, 5 TB/s at 80 %, floors of 2 us."""
    gemm = {"fraction": _fact(0.8), "k_overhead": _fact(0), "floor_s": _fact("0 s")}
    grouped = {**gemm, "per_group_s": _fact("0 s")}
    return GpuSpec.model_validate(
        {
            "name": "toy",
            "peak_flops_per_s": {"bf16": _fact("1000 TFLOP/s"), "fp8": _fact("2000 TFLOP/s")},
            "memory_bytes": _fact("80 GiB"),
            "usable_memory_bytes": _fact("80 GiB"),
            "memory_bandwidth_bytes_per_s": _fact("5 TB/s"),
            "num_sms": _fact(128),
            "l2_bytes": _fact("50 MiB"),
            "host_link_bytes_per_s": _fact("50 GB/s"),
            "tdp_w": _fact("700 W"),
            "context_bytes": _fact("0.5 GiB"),
            "curves": {
                "gemm": {"bf16": gemm, "fp8": gemm},
                "grouped_gemm": {"bf16": grouped, "fp8": grouped},
                "attention": {
                    "forward_fraction": _fact(0.6), "backward_fraction": _fact(0.5), "q_half": _fact(256),
                    "floor_s": _fact("2 us"),
                },
                "stream": {"fraction": _fact(0.8), "floor_s": _fact("2 us")},
                "host": {
                    "cpu": "toy", "eager_op_s": _fact("5 us"), "compiled_op_s": _fact("1 us"),
                    "dtensor_op_s": _fact("30 us"), "sync_s": _fact("20 us"),
                },
                "overlap_slowdown": _fact(0.1),
            },
        }
    )  # fmt: skip
