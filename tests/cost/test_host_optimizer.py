"""The part of an optimizer that hosts hold and step: seconds, bytes, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

import mofa
from mofa.cost.host_optimizer import HELD_BYTES, host_adam_bytes_per_s
from mofa.errors import SpecError
from mofa.plan.result import Plan
from mofa.specs.framework import FrameworkSpec
from mofa.specs.optimizer_offload import ADAM_MOVED_BYTES, COPIED_BYTES
from mofa.specs.workload import WorkloadSpec

GIB = 2**30


def job(layers: int = 2, **overrides: Any) -> WorkloadSpec:
    changes = {"model.num_layers": layers, **overrides}
    return mofa.load_workload("llama3-8b", seq_len=2048, global_batch=8, overrides=changes)


def on_hosts(share: float, **options: Any) -> FrameworkSpec:
    return mofa.load_framework("megatron", {"optimizer_offload": share, **options})


def planned(framework: FrameworkSpec, workload: WorkloadSpec | None = None, gpus: int = 1, replay: bool = True) -> Plan:
    cluster = mofa.load_cluster("h200-hgx", gpus)
    return mofa.estimate(workload or job(), cluster, "micro_batch=1", framework=framework, replay=replay)


def params(workload: WorkloadSpec) -> float:
    return 2 * 128256 * 4096 + workload.model.num_layers * 218_112_000 + 4096


@pytest.mark.parametrize("replay", [False, True])
def test_a_whole_optimizer_on_one_host_takes_its_copies_and_its_steps(replay: bool) -> None:
    threads, cluster = 4, mofa.load_cluster("h200-hgx", 1)
    host = cluster.gpu.curves.host.optimizer
    assert host is not None
    moved = params(job())
    wanted = moved * (
        COPIED_BYTES / cluster.gpu.host_link_bytes_per_s.value
        + ADAM_MOVED_BYTES / host_adam_bytes_per_s(cluster, threads, host)
        + COPIED_BYTES / host.pageable_bytes_per_s.value
    )
    longer = planned(on_hosts(1.0, host_threads=threads), replay=replay).step_s
    longer -= planned(on_hosts(0.0), replay=replay).step_s
    assert longer == pytest.approx(wanted, rel=0.03)  # less the device's own step


def test_overlapped_copies_hide_gradients_behind_steps() -> None:
    alone, beside = (
        planned(on_hosts(1.0, overlap_optimizer_copies=overlap), replay=False) for overlap in (False, True)
    )
    link = mofa.load_cluster("h200-hgx", 1).gpu.host_link_bytes_per_s.value
    assert alone.step_s - beside.step_s == pytest.approx(COPIED_BYTES * params(job()) / link, rel=0.1)


def test_tensors_go_to_hosts_whole_the_heads_first() -> None:
    """An eighth asks for less than the head has, which goes as a whole; so does the device's memory of its states."""
    head, states = 128256 * 4096, 12.0
    plans = [planned(on_hosts(share)) for share in (0.0, 0.125, 0.999 * head / params(job()))]
    saved = plans[0].memory.allocated_bytes - plans[1].memory.allocated_bytes
    assert saved == pytest.approx(states * head, rel=0.02)
    assert plans[1].step_s == pytest.approx(plans[2].step_s, rel=1e-3)
    assert plans[1].memory.allocated_bytes == plans[2].memory.allocated_bytes


def test_all_states_leave_the_device() -> None:
    """What is alive at the peak has none; the closed form says the same."""
    for replay in (False, True):
        kept, moved = (planned(on_hosts(share), replay=replay).memory for share in (0.0, 1.0))
        assert kept.by_component["optimizer_states"] > 10 * GIB
        assert moved.by_component["optimizer_states"] == 0.0


def test_a_rank_that_owns_one_piece_steps_all_of_it() -> None:
    """Of 64 ranks each owns a 64th of the parameters, less than the head has: a half becomes all."""
    wide = mofa.load_workload("llama3-8b", seq_len=2048, global_batch=64)
    half, whole = (planned(on_hosts(share), wide, 64, replay=False) for share in (0.5, 1.0))
    assert half.step_s == pytest.approx(whole.step_s, rel=1e-3)


def test_threads_tend_to_what_memory_moves() -> None:
    one, eight = (mofa.load_cluster("h200-hgx", n) for n in (1, 8))
    host = one.gpu.curves.host.optimizer
    assert host is not None
    rates = [host_adam_bytes_per_s(one, threads, host) for threads in (1, 8, 1000)]
    assert rates == sorted(rates) and rates[-1] < host.memory_bytes_per_s.value
    assert host_adam_bytes_per_s(eight, 1000, host) < host.memory_bytes_per_s.value / 4  # four ranks of a processor


def test_a_plan_says_what_its_hosts_hold() -> None:
    plan = planned(on_hosts(1.0, host_threads=8), gpus=8, replay=False)
    (note,) = (note for note in plan.notes if "hosts hold and step" in note)
    assert "OMP_NUM_THREADS=8" in note and "100%" in note


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("torchtitan", {"optimizer_offload": 1.0}, "option of megatron, not of torchtitan"),
        ("megatron", {"optimizer_offload": 1.0, "data_parallel": "ddp"}, "needs data_parallel: distributed-optimizer"),
        ("megatron", {"optimizer_offload": 1.0, "optimizer": "foreach"}, "with optimizer: te"),
        ("megatron", {"optimizer_offload": 1.0, "fp8_params": True}, "fp8_params"),
        ("megatron", {"optimizer_offload": 1.5}, "less than or equal to 1"),
        ("megatron", {"host_threads": 4}, "are options of optimizer_offload"),
        ("megatron", {"overlap_optimizer_copies": True}, "are options of optimizer_offload"),
    ],
)
def test_what_no_hybrid_optimizer_has_is_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        mofa.load_framework(name, options)


def test_hosts_that_are_full_or_unknown_are_refused() -> None:
    large = mofa.load_workload("llama3-405b", seq_len=4096, global_batch=64)
    with pytest.raises(SpecError, match=r"a node would hold .* and has .*; use at most 0\.\d+, or more nodes"):
        mofa.estimate(large, mofa.load_cluster("h100-hgx", 8), "tp=8", framework=on_hosts(1.0), replay=False)
    with pytest.raises(SpecError, match="nothing is known of an optimizer's step on the hosts of gb200"):
        mofa.estimate(job(), mofa.load_cluster("gb200-nvl72", 4), "tp=1", framework=on_hosts(1.0), replay=False)
    narrow = job(2, **{"precision.moments": "bf16"})
    with pytest.raises(SpecError, match="fp32 moments"):
        planned(on_hosts(1.0), narrow, replay=False)
    assert HELD_BYTES == 16.0  # main copy, two moments and a gradient of 4 bytes each


def test_a_search_takes_the_word() -> None:
    found = mofa.find_plans(
        job(8), mofa.load_cluster("h200-hgx", 8), with_=["optimizer_offload"], replay=False, top=1, offers=False,
        maximum={"cp": 1, "pp": 2, "vpp": 1, "micro_batch": 1},
    )  # fmt: skip
    assert found.report.plans[0].memory.by_component["optimizer_states"] == 0.0
    assert any("OMP_NUM_THREADS=8" in note for note in found.report.plans[0].notes)
