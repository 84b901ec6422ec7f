"""What this machine can measure, as one line of JSON: GPUs, versions, frameworks, and whether arithmetic is right."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from typing import Any


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    """A product on random numbers against float64 on the CPU, and how much memory is free."""
    import torch

    device = torch.device("cuda", index)
    generator = torch.Generator().manual_seed(index)
    a = torch.randn(512, 512, generator=generator)
    b = torch.randn(512, 512, generator=generator)
    exact = a.bfloat16().double() @ b.bfloat16().double()
    got = (a.to(device).bfloat16() @ b.to(device).bfloat16()).double().cpu()
    error = float((got - exact).norm() / exact.norm())
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "error": error,
        "free_bytes": free,
        "total_bytes": total,
        "ok": error < 1e-2,
    }


def print_machine_state() -> None:
    """Print the state of this machine."""
    state: dict[str, Any] = {"torch": None, "gpus": []}
    if importlib.util.find_spec("torch") is not None:
        import torch

        state["torch"] = torch.__version__
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        state["gpus"] = [_gpu(i) for i in range(count)]
    state["torchtitan"] = _version("torchtitan")
    state["torchao"] = _version("torchao")
    state["megatron"] = _version("megatron-core")
    state["transformer_engine"] = _version("transformer-engine")
    print(json.dumps(state))


if __name__ == "__main__":
    print_machine_state()
