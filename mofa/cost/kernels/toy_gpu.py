"""A toy GPU with round numbers, for doctests and tests that are checked by hand."""

from __future__ import annotations

from typing import Any

from mofa.specs.hardware import GpuSpec


def _fact(value: object) -> dict[str, Any]:
    return {"value": value, "provenance": "assumed", "source": "a round number for examples"}


def toy_gpu() -> GpuSpec:
    """A GPU for examples: 1000 TFLOP/s at 80 % sustained, 128 multiprocessors, 5 TB/s at 80 %, floors of 2 us."""

    def curve(**form: Any) -> dict[str, Any]:
        return {"provenance": "assumed", "source": "round numbers for examples", "form": form}

    def gemm(rate: float) -> dict[str, Any]:
        return curve(tiles=[[128, 256, rate], [128, 128, 0.92 * rate], [64, 64, 0.5 * rate]], k_overhead=0.0,
                     floor_s=0.0, bytes_per_s=4e12, sharpness=64.0, splits=[1])  # fmt: skip

    def grouped(rate: float) -> dict[str, Any]:
        return curve(small_rate=0.7 * rate, large_rate=rate, small_k_overhead=0.0, large_k_overhead=0.0, floor_s=0.0,
                     per_group_s=0.0, bytes_per_s=4e12, sharpness=64.0)  # fmt: skip

    def attention(flops_per_s: float, products: float) -> dict[str, Any]:
        unit_s = products * 2 * 128 * 128 * 128 * 128 / flops_per_s
        return curve(block=128, slots=128, unit_s=unit_s, floor_s=2e-6, tail=1.0, wave=1.0, causal=1.0,
                     bytes_per_s=4e12)  # fmt: skip

    stream = curve(launch_s=2e-6, bytes_per_element=4.0, bytes_per_s=4e12)
    return GpuSpec.model_validate(
        {
            "name": "toy",
            "peak_flops_per_s": {
                "bf16": _fact("1000 TFLOP/s"), "fp8": _fact("2000 TFLOP/s"), "fp32": _fact("60 TFLOP/s"),
            },
            "memory_bytes": _fact("80 GiB"),
            "capacity_bytes": _fact("80 GiB"),
            "memory_bandwidth_bytes_per_s": _fact("5 TB/s"),
            "num_sms": _fact(128),
            "l2_bytes": _fact("50 MiB"),
            "host_link_bytes_per_s": _fact("50 GB/s"),
            "tdp_w": _fact("700 W"),
            "context_bytes": _fact("0.5 GiB"),
            "curves": {
                "gemm": {"bf16": gemm(800e12), "fp8": gemm(1600e12), "fp32": gemm(50e12)},
                "grouped_gemm": {"bf16": grouped(800e12), "fp8": grouped(1600e12), "fp32": grouped(50e12)},
                "attention": {
                    "cudnn fwd 128/128": attention(600e12, 2.0), "cudnn bwd 128/128": attention(500e12, 5.0),
                },
                "stream": {"default": stream},
                "host": {
                    "cpu": "toy", "eager_op_s": _fact("5 us"), "linear_op_s": _fact("5 us"),
                    "backward_op_s": _fact("0 s"), "compiled_op_s": _fact("1 us"), "compiled_call_s": _fact("0 s"),
                    "compiled_module_s": _fact("0 s"), "compiled_node_s": _fact("0 s"),
                    "compiled_attention_s": _fact("0 s"),
                    "dtensor_op_s": _fact("30 us"), "sync_s": _fact("20 us"), "model_op_s": _fact("0 s"),
                    "function_s": _fact("0 s"), "loop_function_s": _fact("0 s"), "view_s": _fact("0 s"),
                    "loop_guarded_s": _fact("0 s"), "grad_hook_s": _fact("0 s"), "graph_hook_s": _fact("0 s"),
                    "guarded_call_s": _fact("0 s"),
                    "gemm_choice_s": _fact("0 s"), "kernel_load_s": _fact("0 s"), "item_s": _fact("0 s"),
                    "tensor_pass_s": _fact("0 s"), "step_start_s": _fact("0 s"), "exchange_s": _fact("0 s"),
                    "pass_start_s": _fact("0 s"),
                    "shard_hook_s": _fact("0 s"),
                    "listing_s": _fact("0 s"),
                    "dtensor_hook_s": _fact("0 s"), "redistribute_s": _fact("0 s"), "dtensor_step_s": _fact("0 s"),
                    "selective_op_s": _fact("0 s"), "packed_s": _fact("0 s"), "unpacked_s": _fact("0 s"),
                    "checkpoint_s": _fact("0 s"), "compiled_model_op_s": _fact("0 s"),
                },
                "overlap_slowdown": _fact(0.1),
            },
        }
    )  # fmt: skip
