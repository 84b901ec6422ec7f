"""The host's issue of what a model's Python adds to bare ops: modules, autograd's record and engine, functions, hooks.

Every shape is so small that the device keeps up: what is timed is the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mofa.calibrate.bench.torch_timing import Call, median_and_percentiles
from mofa.calibrate.cases import Sample, UnsupportedCase

WIDTH = 256
REPETITIONS, DROPPED = 9, 2
"""Bursts, and how many of the first are left out."""
Step = Callable[[torch.Tensor], torch.Tensor]
"""From what one layer got to what it gives."""


def autograd_host_sample(op: str, device: str, num: int) -> Sample:
    """Host time of one layer's forward or backward pass, of a chain of ``num``; of a tensor in an optimizer. [s]

    Raises
    ------
    UnsupportedCase
        If there is no such op.
    """
    backward = op.endswith("_bwd")
    name = op.removesuffix("_bwd")
    if name in _OPTIMIZERS:
        return _burst(_OPTIMIZERS[name](device, num), num, device)
    if name in _COLLECTIVES:
        return _burst(_repeated(_COLLECTIVES[name](device), num), num, device)
    if name not in _CHAINS:
        raise UnsupportedCase(f"no op {op}")
    layers, around = _CHAINS[name](device, num)
    return _chain(layers, around, device, num, backward=backward)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _burst(call: Call, num: int, device: str) -> Sample:
    """Host time of a call that does a thing ``num`` times, by each. [s]"""
    times = []
    for _ in range(REPETITIONS):
        _synchronize(device)
        before = time.perf_counter()
        call()
        times.append((time.perf_counter() - before) / num)
    _synchronize(device)
    return median_and_percentiles(times[DROPPED:])


def _repeated(call: Call, num: int) -> Call:
    def many() -> None:
        for _ in range(num):
            call()

    return many


def _chain(
    layers: Sequence[Step], around: Callable[[], Any] | None, device: str, num: int, *, backward: bool
) -> Sample:
    """Host time of one of ``num`` ops of a chain, forward with its graph kept, or backward. Gradients begin as none.

    ``around`` makes the context in which the chain goes forward.
    """
    leaf = torch.ones(WIDTH, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    times = []
    for _ in range(REPETITIONS):
        for layer in layers:
            if isinstance(layer, nn.Module):
                layer.zero_grad(set_to_none=True)
        leaf.grad = None
        _synchronize(device)
        before = time.perf_counter()
        with around() if around is not None else torch.enable_grad():
            x = leaf
            for layer in layers:
                x = layer(x)
        ahead = time.perf_counter()
        total = x.float().sum()
        _synchronize(device)
        if backward:
            before = time.perf_counter()
            total.backward()
            ahead = time.perf_counter()
        times.append((ahead - before) / num)
        _synchronize(device)
    return median_and_percentiles(times[DROPPED:])


Chain = tuple[list[Step], Callable[[], Any] | None]


def _plain(step: Step, device: str, num: int) -> Chain:
    return [step] * num, None


def _linears(device: str, num: int, dtype: torch.dtype = torch.bfloat16) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH, bias=False, device=device, dtype=dtype) for _ in range(num)]


def _modules(device: str, num: int) -> Chain:
    return list(_linears(device, num)), None


def _norms(device: str, num: int) -> Chain:
    return [nn.RMSNorm(WIDTH, device=device, dtype=torch.bfloat16) for _ in range(num)], None


def _autocast(device: str, num: int) -> Chain:
    layers = list(_linears(device, num, torch.float32))
    return layers, partial(torch.autocast, device, torch.bfloat16)


class _Doubled(torch.autograd.Function):
    """A function of Python with one op each way, that keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x + x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad + x


def _functions(device: str, num: int) -> Chain:
    return _plain(lambda x: _Doubled.apply(x), device, num)  # type: ignore[no-untyped-call]


def _guarded(device: str, num: int) -> Chain:
    """A function compiled by itself within eager code, as Megatron's fusions are."""
    fused = torch.compile(lambda x: F.silu(x) * x)
    return _plain(fused, device, num)


def _checkpointed(device: str, num: int) -> Chain:
    from torch.utils.checkpoint import checkpoint

    def step(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(F.silu, x, use_reentrant=False, preserve_rng_state=False)
        return output

    return _plain(step, device, num)


def _selective(device: str, num: int) -> Chain:
    """Ten SiLUs in a region of which one op's result is chosen to be kept: each op passes a mode of Python."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = func == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def region(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = F.silu(x)
        return x

    def step(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(
            region, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
        )
        return output

    return _plain(step, device, num // 10)


def _mesh(device: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device, (1,))


def _dtensor_linears(device: str, num: int) -> Chain:
    """Columnwise linears on distributed tensors, as torchtitan's tensor parallelism has them."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = _mesh(device)
    layers = [parallelize_module(layer, mesh, ColwiseParallel()) for layer in _linears(device, num)]

    def first(x: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(x, mesh, [Replicate()])

    return [first, *layers], None


def _dtensor_silus(device: str, num: int) -> Chain:
    from torch.distributed.tensor import DTensor, Shard

    mesh = _mesh(device)
    return [lambda x: DTensor.from_local(x, mesh, [Shard(0)]), *[F.silu] * num], None


def _sharded(device: str, num: int) -> Chain:
    """Linears of which each is a group of FSDP2's: a gather forward, another and a reduction backward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = _mesh(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = _linears(device, num, torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model = nn.Sequential(*layers)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return [model], None


def _all_reduce(device: str) -> Call:
    import torch.distributed as dist

    _mesh(device)
    x = torch.ones(WIDTH, device=device)
    return lambda: dist.all_reduce(x)


def _all_to_all(device: str) -> Call:
    import torch.distributed as dist

    _mesh(device)
    x, y = torch.ones(WIDTH, device=device), torch.ones(WIDTH, device=device)
    return lambda: dist.all_to_all_single(y, x, [WIDTH], [WIDTH])


def _functional_gather(device: str) -> Call:
    import torch.distributed._functional_collectives as funcol

    mesh, x = _mesh(device), torch.ones(WIDTH, device=device)
    return lambda: funcol.wait_tensor(funcol.all_gather_tensor(x, 0, mesh.get_group()))


def _parameters(device: str, num: int) -> list[torch.Tensor]:
    made = [torch.ones(WIDTH, device=device, requires_grad=True) for _ in range(num)]
    for p in made:
        p.grad = torch.ones_like(p)
    return made


def _adamw(device: str, num: int, **how: bool) -> Call:
    optimizer = torch.optim.AdamW(_parameters(device, num), lr=1e-4, **how)
    return lambda: optimizer.step()


def _clip(device: str, num: int) -> Call:
    parameters = _parameters(device, num)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)


_CHAINS: dict[str, Callable[[str, int], Chain]] = {
    "grad_silu": partial(_plain, F.silu),
    "grad_view": partial(_plain, lambda x: x.view(WIDTH, WIDTH)),
    "grad_mul": partial(_plain, lambda x: x * 0.5),
    "module_linear": _modules,
    "module_rmsnorm": _norms,
    "autocast_linear": _autocast,
    "function": _functions,
    "guarded": _guarded,
    "checkpoint": _checkpointed,
    "selective": _selective,
    "dtensor_linear": _dtensor_linears,
    "dtensor_silu": _dtensor_silus,
    "fsdp_linear": _sharded,
}
"""What a chain is made of; with ``_bwd`` behind the name its backward pass is timed."""
_COLLECTIVES: dict[str, Callable[[str], Call]] = {
    "all_reduce": _all_reduce, "all_to_all": _all_to_all, "functional_gather": _functional_gather,
}  # fmt: skip
_OPTIMIZERS: dict[str, Callable[[str, int], Call]] = {
    "adamw_fused": partial(_adamw, fused=True), "adamw_foreach": partial(_adamw, foreach=True), "clip": _clip,
}  # fmt: skip
