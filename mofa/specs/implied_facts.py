"""Facts of a framework that follow from a run's options: DeepSpeed's optimizers, the format of Megatron's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ZERO1: dict[str, Any] = {
    "fuses_wgrad_accumulation": False, "overlap_input_grads": False, "grads_bytes_per_param": 2,
    "accumulation_bytes_per_param": 6, "states_bytes_per_param": 16, "reduced_bytes_per_param": 2,
}  # fmt: skip
"""What follows from DeepSpeed's ZeRO stage 1: autograd adds 16-bit gradients (4 read, 2 written), of which a partition
is turned into fp32 for the step: 4 bytes a parameter of the partition beside the 12 of the states, a block that the
allocator keeps from initialize_optimizer_states on (deepspeed/runtime/zero/stage_1_and_2.py, step)."""
DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero0": {**ZERO1, "data_parallel": "ddp"},
    "zero1": ZERO1,
    "bf16": {
        "fuses_wgrad_accumulation": False, "overlap_input_grads": False, "grads_bytes_per_param": 6,
        "accumulation_bytes_per_param": 18,
    },
}  # fmt: skip
"""What follows from each of DeepSpeed's optimizers where a run says no other. BF16_Optimizer keeps fp32 gradients of
all parameters beside the bf16 ones, which it clears at the next backward pass: 6 bytes a parameter. After each
micro-batch it casts a gradient (2 read, 4 written) and adds it (8 read, 4 written):
deepspeed/runtime/bf16_optimizer.py, update_hp_grads."""
NOT_OTHERWISE = ("fuses_wgrad_accumulation", "grads_bytes_per_param", "states_bytes_per_param")
"""Of these nothing else can be: no kernel adds to gradients that DeepSpeed holds in 16 bits, and Adam steps in fp32."""
GRADIENTS: dict[str, dict[str, Any]] = {
    "fp32": {"grads_bytes_per_param": 4, "reduced_bytes_per_param": 4, "accumulation_bytes_per_param": 10},
    "bf16": {"grads_bytes_per_param": 2, "reduced_bytes_per_param": 2, "accumulation_bytes_per_param": 6},
}
"""What follows from the number format of Megatron's main gradients, which are reduced as they are held: ``grad_dtype``
of core/distributed/param_and_grad_buffer.py (Megatron-Core 0.16.1), fp32 with ``grad_reduce_in_fp32``."""


def implied_facts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that follow from a run's options where it doesn't say them itself; other facts are its profile's.

    Examples
    --------
    >>> implied_facts({"deepspeed": "bf16"})["grads_bytes_per_param"], implied_facts({"compile": True})
    (6, {})
    >>> implied_facts({"grads": "bf16"})
    {'grads_bytes_per_param': 2, 'reduced_bytes_per_param': 2, 'accumulation_bytes_per_param': 6}
    """
    engine, grads = options.get("deepspeed"), options.get("grads")
    of_engine = dict(DEEPSPEED.get(engine, {})) if isinstance(engine, str) else {}
    return {**of_engine, **(GRADIENTS.get(grads, {}) if isinstance(grads, str) else {})}
