"""What ``foreach_reduce`` of FSDP2 holds while it reduces (PyTorch 2.11, fsdp/_fully_shard/_fsdp_collectives.py)."""

from __future__ import annotations

import pytest

from mofa.cost.allocations.allocation_trace import block_allocation_trace
from mofa.replay.replayer import Replayer
from mofa.search.strategy_estimator import strategy_estimator
from mofa.specs.model import ModelSpec
from tests.blocks.small import EXPERTS, LATENT, framework, llama
from tests.cost.toy import cluster, workload

MIB = 2**20


def held(model: ModelSpec, block: str, *, ranks: int = 2, ep: int = 1, profile: str = "torchtitan") -> set[str]:
    """Gradients that a group's reduction still holds when its sum is there."""
    job = workload(model, seq_len=256, global_batch=8)
    strategy = f"dp={ranks} ep={ep} micro_batch=1 recompute=none"
    estimator = strategy_estimator(job, cluster(ranks), framework(profile), strategy)
    tapes = estimator.parts[0].costs.tapes
    (name,) = [name for name in tapes if name.split()[0] == block]
    deeds = block_allocation_trace(tapes[name]).backward
    return {gone for deed in deeds if deed.op.endswith("reduce_returns") for gone in deed.free}


def test_the_parameter_registered_last_keeps_its_gradient_until_the_reduction_returns() -> None:
    grouped, latent = llama(), llama(moe={**EXPERTS, "shared_hidden": 256, "first_k_dense": 1}, attention=LATENT)
    assert held(grouped, "head") == {"dW:output"}
    assert held(grouped, "embedding") == {"dW:embedding"}
    assert held(grouped, "dense") == set()  # its norms come last
    assert held(latent, "dense") == {"dW:mlp.w3"}
    assert held(latent, "moe") == {"dW:shared.w3"}
    assert held(latent, "moe", ranks=4, ep=2) == {"dW:shared.w3", "dW:experts.w3"}
    assert held(latent, "moe", ranks=2, ep=2) == {"dW:shared.w3"}  # experts of one rank each are not reduced over any


def test_only_fsdp2_holds_it() -> None:
    assert held(llama(), "head", profile="fsdp1") == set()


def test_a_large_head_adds_the_sharded_sum_to_the_peak() -> None:
    """A vocabulary of 256,000 times a hidden size of 2,048 on two ranks: 2 bytes a parameter of the output layer stay
    beside the 4 that are sent and the 4 / 2 that come out. Parameters, moments and earlier gradients take 16 / 2."""
    model = llama(vocab=256_000, hidden=2048, attention={"kind": "gqa", "num_heads": 16, "num_kv_heads": 4,
                                                        "head_dim": 128})  # fmt: skip
    job = workload(model, seq_len=256, global_batch=8)
    estimator = strategy_estimator(job, cluster(2), framework("torchtitan"), "dp=2 micro_batch=1 recompute=full")
    played, closed = Replayer(estimator).rank_memory(0), estimator.breakdown()
    assert float(closed.allocated_bytes[0]) == pytest.approx(played.allocated, rel=1e-3)
    head = 256_000 * 2048
    params = 2 * head + 2 * (2.5 * 2048 * 2048 + 3 * 2048 * 1536)
    assert played.allocated == pytest.approx(16 / 2 * params + (2 + 4 + 4 / 2) * head, rel=0.01)
