"""PyTorch's first FSDP as a profile: torchtitan's modules and FSDP2's gathers, one group that shards everything."""

from __future__ import annotations

import numpy as np
import pytest

import mofa
from mofa.cost.estimate import TableEstimator
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.step_time.hybrid_sharding import exposed_and_hidden_replica_all_reduces_s
from mofa.errors import StrategyError
from mofa.replay.rank.from_estimator import gathered_row_of_strategy
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.framework_offers import PYTORCH_MODULES
from mofa.specs.params import num_params

JOB = mofa.load_workload("llama3-8b", seq_len=4096, global_batch=32)
MACHINES = mofa.load_cluster("h100-hgx", 16)
FSDP1 = mofa.load_framework("fsdp1")


def test_it_costs_what_fsdp2_costs_with_the_same_options() -> None:
    """The same launches, gathers and bytes without biases: only defaults and the reduced gradients' format differ."""
    same = {"optimizer": FSDP1.optimizer, "grouped_alignment": 1, "early_stop": True}
    titan = mofa.load_framework("torchtitan", overrides=same)
    own = mofa.load_framework("fsdp1", overrides={"reduced_bytes_per_param": 4, "flat_params": False})
    ours = mofa.estimate(JOB, MACHINES, {"recompute": "full"}, framework=own)
    theirs = mofa.estimate(JOB, MACHINES, {"recompute": "full"}, framework=titan)
    assert ours.step_s == theirs.step_s
    assert ours.memory.allocated_bytes == pytest.approx(theirs.memory.allocated_bytes, rel=1e-3)
    assert PYTORCH_MODULES == ("fsdp1", "torchtitan")
    half = mofa.estimate(JOB, MACHINES, {"recompute": "full"}, framework=FSDP1)
    assert half.step_s < ours.step_s  # its gradients are reduced in bf16


def test_views_are_not_copied_out_and_gradients_are_divided() -> None:
    """A parameter moves 4 bytes less in each of two gathers and 4 more where its bf16 gradient is divided by hand."""
    copied = mofa.load_framework("fsdp1", overrides={"flat_params": False})
    ours, theirs = (mofa.estimate(JOB, MACHINES, {}, framework=f, replay=False) for f in (FSDP1, copied))
    saved_s = theirs.time.exposed["dp"] - ours.time.exposed["dp"]
    rate = MACHINES.gpu.curves.memory_bound_curve_like("copy", False).form.bytes_per_s
    assert saved_s == pytest.approx(2 * 4.0 * num_params(JOB.model) / rate, rel=0.2)  # two micro-batches
    assert ours.memory.allocated_bytes == pytest.approx(theirs.memory.allocated_bytes, rel=1e-6)


def test_default_keeps_all_activations() -> None:
    assert mofa.estimate(JOB, MACHINES, {}, framework=FSDP1).strategy.recompute == "none"


def test_replicas_over_nodes() -> None:
    hsdp = mofa.load_framework("fsdp1", overrides={"data_parallel": "hsdp", "dp_replicate": 2})
    whole = mofa.estimate(JOB, MACHINES, {}, framework=FSDP1)
    assert mofa.estimate(JOB, MACHINES, {}, framework=hsdp).memory.allocated_bytes > whole.memory.allocated_bytes


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        ({"tp": 2}, r"fsdp1: tp \(2\)"),
        ({"pp": 2}, r"fsdp1: .*pp \(2\)"),
        ({"recompute": "ops"}, "torchtitan's"),
        ({"recompute": "full:4"}, "use full"),
    ],
)
def test_what_it_lacks(strategy: dict[str, object], error: str) -> None:
    with pytest.raises(StrategyError, match=error):
        mofa.estimate(JOB, MACHINES, strategy, framework=FSDP1)


def test_an_older_pytorch_takes_its_own_products() -> None:
    """Played, in closed form and searched alike: the curves change before anything is costed."""
    older = mofa.load_framework("fsdp1", overrides={"pytorch": "2.1"})
    for replay in (True, False):
        was, now = (
            mofa.estimate(JOB, MACHINES, {}, framework=f, replay=replay).time.exposed["gemm"] for f in (older, FSDP1)
        )
        assert 1.02 < was / now < 1.08
    assert mofa.estimate(JOB, mofa.load_cluster("a100-hgx", 16), {}, framework=older, replay=False).step_s == (
        mofa.estimate(JOB, mofa.load_cluster("a100-hgx", 16), {}, framework=FSDP1, replay=False).step_s
    )
    with pytest.raises(mofa.SpecError, match="pytorch"):
        mofa.load_framework("fsdp1", overrides={"pytorch": "2.1.0"})


def test_the_first_flash_attention_takes_longer() -> None:
    """Dao 2023, section 4.1: 1.3 to 1.5 times forward, around twice backward."""
    second = mofa.estimate(JOB, MACHINES, {}, framework=mofa.load_framework("fsdp1", overrides={"attention": "flash"}))
    first = mofa.estimate(JOB, MACHINES, {}, framework=mofa.load_framework("fsdp1", overrides={"attention": "flash1"}))
    assert first.step_s > second.step_s
    assert first.memory.allocated_bytes == pytest.approx(second.memory.allocated_bytes, rel=1e-2)


def test_one_product_for_query_key_and_value() -> None:
    """The same FLOPs in one launch of two; backward concatenates three gradients."""
    fused = mofa.load_framework("fsdp1", overrides={"fused_qkv": True})
    one = mofa.estimate(JOB, MACHINES, {}, framework=fused)
    three = mofa.estimate(JOB, MACHINES, {}, framework=FSDP1)
    assert one.step_s != three.step_s
    assert one.step_s == pytest.approx(three.step_s, rel=0.03)


@pytest.mark.parametrize(("name", "width"), [("fsdp1", 2.0), ("torchtitan", 4.0)])
def test_replicas_sum_in_the_dtype_that_the_framework_reduces_in(name: str, width: float) -> None:
    """fms-fsdp reduces in bf16 (policies/mixed_precision.py), torchtitan in fp32: a rank's shard over four nodes of 8,
    here with no backward to hide behind. Each of 34 pieces pays its own start: 1 to 3 % more than one sum of all."""
    spec = mofa.load_framework(name, overrides={"data_parallel": "hsdp", "dp_replicate": 4})
    machines = mofa.load_cluster("h100-hgx", 32)
    job = mofa.load_workload("llama3-8b", seq_len=2048, global_batch=32)
    row = checked_strategy_row(job, machines, spec, {"micro_batch": 1})
    rows = gathered_row_of_strategy(TableEstimator(job, machines, spec, row, routing_loads_by_ep(job, row)))
    exposed, hidden = exposed_and_hidden_replica_all_reduces_s(rows, np.zeros((1, 1)))
    payload = np.array([width * 8.03e9 / 8])
    wanted = collective_s("all_reduce", payload, rows.groups["dp_replicate"], rows.costs.machine.network_fabric)
    assert float(wanted[0]) < float(exposed[0]) == pytest.approx(float(wanted[0]), rel=0.03)
    assert float(hidden[0]) == 0.0
