"""Megatron's hybrid device optimizer: what holds and steps a part of the parameters on hosts, and with what it runs."""

from __future__ import annotations

from mofa.specs.base import BytesPerSFact, CountFact, Spec

OPTIMIZER_OFFLOAD = "optimizer_offload"
"""The option, and the word of ``--with`` that sets it."""
ADAM_MOVED_BYTES = 28.0
"""Of a parameter in fp32 in a step of Adam on a processor: reads parameter, gradient and two moments, writes all but
the gradient (PyTorch 2.11, aten/src/ATen/native/cpu/FusedAdamKernel.cpp). [B/param]"""
COPIED_BYTES = 4.0
"""Of a parameter on each way: gradients go to the host and parameters come back in fp32 (Megatron-Core 0.16.1,
core/optimizer/cpu_offloading/hybrid_optimizer.py). [B/param]"""


class HostOptimizerRates(Spec):
    """What a host's processor and memory reach under an optimizer's step."""

    thread_bytes_per_s: BytesPerSFact
    """What a thread moves in Adam's fused step, :data:`ADAM_MOVED_BYTES` a parameter, if memory took no time. [B/s]"""
    memory_bytes_per_s: BytesPerSFact
    """What more and more threads of a processor tend to together. [B/s]"""
    processors: CountFact
    """Of a node, among which its ranks are dealt. [-]"""
    pageable_bytes_per_s: BytesPerSFact
    """Parameters from memory that is not pinned to the device, cast there; a GPU's alone. [B/s]"""


def check_optimizer_offload(
    name: str, share: float, data_parallel: str, optimizer: str, *, on_engine: bool, fp8_params: bool, has_options: bool
) -> None:
    """Refuse options that the hybrid optimizer cannot have.

    ``on_engine`` says whether layers are Transformer Engine's, ``has_options`` whether options of an offloaded
    optimizer are set.

    Raises
    ------
    ValueError
        If the optimizer is offloaded where no such thing is, or its options are set without it.
    """
    if not share:
        if has_options:
            raise ValueError(
                "overlap_optimizer_copies and host_threads are options of optimizer_offload; leave them out"
            )
        return
    if not on_engine:
        raise ValueError(f"optimizer_offload ({share:g}) is an option of megatron, not of {name}; leave it out")
    # optimizer_config.py: use_precision_aware_optimizer, which it needs, asks for the distributed optimizer
    if data_parallel != "distributed-optimizer":
        raise ValueError(
            f"optimizer_offload ({share:g}) needs data_parallel: distributed-optimizer, not {data_parallel}"
        )
    if optimizer != "te":
        raise ValueError(f"optimizer_offload ({share:g}) is modelled with optimizer: te, not {optimizer}")
    if fp8_params:
        raise ValueError(f"optimizer_offload ({share:g}) is not modelled with fp8_params; leave one out")
