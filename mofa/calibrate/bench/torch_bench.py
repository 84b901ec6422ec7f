"""The bench on a CUDA device: which case is timed how, and what is recorded of the machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import torch

from mofa.calibrate.bench.held_multiprocessors import LayersBesideHeldMultiprocessors
from mofa.calibrate.bench.te_kernels import te_bf16_sample
from mofa.calibrate.bench.torch_autograd import autograd_host_sample
from mofa.calibrate.bench.torch_host import copy_sample, host_issue_sample, sustained_sample, throttled_sample
from mofa.calibrate.bench.torch_host_optimizer import host_optimizer_sample
from mofa.calibrate.bench.torch_matrix import attention_calls, gemm_calls, grouped_product_calls
from mofa.calibrate.bench.torch_memory import MemoryBoundCalls
from mofa.calibrate.bench.torch_routed import routed_calls
from mofa.calibrate.bench.torch_sequence import op_sequence_host_sample
from mofa.calibrate.bench.torch_timing import GpuMonitor, RandomInputs, time_calls
from mofa.calibrate.cases import Case, Sample, UnsupportedCase
from mofa.calibrate.shapes.collective import HELD_MULTIPROCESSORS
from mofa.calibrate.shapes.host_ops import HOST_OPTIMIZER
from mofa.calibrate.shapes.te_bf16 import TE_BF16_FAMILIES
from mofa.calibrate.shapes.te_fp8 import FAMILIES as TE_FAMILIES
from mofa.calibrate.shapes.te_throttled import FAMILY as TE_THROTTLED

SMI_FIELDS = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,pcie.link.gen.max,pcie.link.width.max"


class TorchBench:
    """Times every one-GPU family."""

    def __init__(self, device: str = "cuda", *, pool_gib: float = 4.0) -> None:
        self.device = device
        self.gpu = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
        self.pool, self.clock = RandomInputs(device, pool_gib), GpuMonitor(device)
        self._memory = MemoryBoundCalls(self.pool)
        self._beside_held = LayersBesideHeldMultiprocessors(self.clock)

    def time_case(self, case: Case) -> Sample:
        """Time one case; `UnsupportedCase` where this torch or this device cannot run it."""
        try:
            return self._time_case(case)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            if self.device == "cuda":
                torch.cuda.synchronize()
            raise UnsupportedCase(f"{type(error).__name__}: {str(error).splitlines()[0][:160]}") from error

    def _time_case(self, case: Case) -> Sample:
        if case.family in (*TE_BF16_FAMILIES, TE_THROTTLED):
            return te_bf16_sample(case, self.pool, self.clock)
        if case.family == "host":
            return host_issue_sample(case, self.pool, self.clock)
        if case.family == "autograd":
            return autograd_host_sample(case.op, self.device, case.shape_size("ops"))
        if case.family == "sequence":
            return op_sequence_host_sample(case, self.device)
        if case.family == HOST_OPTIMIZER:
            return host_optimizer_sample(case, self.device, self.clock)
        if case.family == "copy":
            return copy_sample(case, self.pool, self.clock)
        if case.family == "sustained":
            return sustained_sample(case, self.pool, self.clock)
        if case.family == "throttled":
            kind, load = case.variant.split("_")
            calls = self._memory.build_calls(replace(case, variant=kind))
            return throttled_sample(load, calls, self.pool, self.clock)
        if case.family == HELD_MULTIPROCESSORS:
            return self._beside_held.sample(case)
        if case.family in TE_FAMILIES:
            from mofa.calibrate.bench.te_fp8 import te_fp8_sample

            return te_fp8_sample(case, self.pool, self.clock)
        if case.family in ("memory_bound", "compiled"):
            calls = self._memory.build_calls(case)
        elif case.family == "routed":
            calls = routed_calls(case, self.pool)
        else:
            make = {
                "gemm": gemm_calls,
                "unaligned_gemm": gemm_calls,
                "grouped_gemm": grouped_product_calls,
                "attention": attention_calls,
            }
            if case.family not in make:
                raise UnsupportedCase(f"family {case.family} needs several GPUs")
            calls = make[case.family](case, self.pool)
        return time_calls(calls, self.device, self.clock)

    def environment(self) -> dict[str, object]:
        """What is recorded of the machine; see `machine_environment`."""
        return machine_environment(self.device)


def cpu_name() -> str:
    """The processor's name, as the kernel gives it."""
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def machine_environment(device: str) -> dict[str, object]:
    """GPU, driver, versions, topology, clocks and NCCL settings; no name of the machine or its user."""
    facts: dict[str, object] = {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else cpu_name(), "cpu": cpu_name(),
        "num_cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "device": device,
        "nccl_settings": nccl_settings(), "nccl_algorithm": allowed_nccl_algorithms(),
    }  # fmt: skip
    if device != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(0)
    facts |= {
        "num_gpus": torch.cuda.device_count(), "gpu_ids": anonymous_gpu_ids(),
        "total_memory_bytes": properties.total_memory,
        "num_sms": properties.multi_processor_count, "l2_bytes": getattr(properties, "L2_cache_size", None),
        "compute_capability": f"{properties.major}.{properties.minor}", "cudnn": cudnn_version(),
        "transformer_engine": package_version("transformer_engine"), "megatron_core": package_version("megatron_core"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())), "nvls": os.environ.get("NCCL_NVLS_ENABLE", "default"),
        "driver_and_clocks": _smi(f"--query-gpu={SMI_FIELDS}", "--format=csv"),
        "topology": _smi("topo", "-m"), "nvlink": _smi("nvlink", "-s", "-i", "0"),
    }  # fmt: skip
    return facts


def cudnn_version() -> int:
    """Of the cuDNN that is loaded, as 91400 for 9.14.0: Transformer Engine may have found another than PyTorch's."""
    major, minor, patch = torch._C._cudnn.getRuntimeVersion()  # type: ignore[attr-defined]
    return 10_000 * int(major) + 100 * int(minor) + int(patch)


def anonymous_gpu_ids() -> str:
    """Tells this machine's GPUs from those of another; no number of the maker's can be read off it."""
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return hashlib.sha256(" ".join(uuids).encode()).hexdigest()[:12]


def package_version(package: str) -> str | None:
    """Version of a package, or None where it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def nccl_settings() -> dict[str, str]:
    """The environment variables that steer NCCL, without those of its log."""
    chosen = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL")) and "DEBUG" not in k}
    return dict(sorted(chosen.items()))


def allowed_nccl_algorithms() -> str:
    """Which algorithms NCCL may choose from; a cluster with others does not inherit these curves."""
    forced = os.environ.get("NCCL_ALGO")
    nvls = os.environ.get("NCCL_NVLS_ENABLE", "default")
    chosen = f"forced: {forced}" if forced else "ring or tree, as NCCL chooses"
    return f"{chosen}; NVLS {'off' if nvls == '0' else nvls}; SHARP {os.environ.get('NCCL_COLLNET_ENABLE', 'off')}"


def _smi(*arguments: str) -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    text = re.sub(r"\x1b\[[0-9;]*m|\(UUID: [^)]*\)", "", done.stdout)
    return [line.rstrip() for line in text.splitlines() if line.strip()][:40]
