"""What the device waits for the host in an optimizer step, and how far ahead the host is then: by hand and as timed."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from mofa.cost.optimizer import ParameterShards
from mofa.cost.optimizer_issue import (
    PARAMS_A_LAUNCH,
    SteppedTensors,
    host_lead_behind_optimizer_s,
    optimizer_issue_times_per_tensor,
    optimizer_waits_for_host_s,
)
from mofa.cost.step_time.optimizer_step import num_stepped_tensors
from mofa.replay.rank.from_estimator import gathered_row_of_strategy
from mofa.search.strategy_estimator import strategy_estimator
from mofa.specs.files import load_yaml
from mofa.specs.hardware import ClusterSpec
from mofa.specs.load import load_cluster, load_framework, load_workload
from mofa.units import parse_quantity
from tests.cost.toy import cluster, framework, llama, with_facts, workload

ROOT = Path(__file__).parents[2]
JOB = workload(llama(vocab=32768))


def one_gpu(**seconds: float) -> ClusterSpec:
    """A GPU whose host takes as long for some works, and whose optimizer nobody timed whole."""
    one = cluster(1)
    host = with_facts(one.gpu.curves.host, **seconds).model_copy(update={"fused_optimizer": None})
    curves = one.gpu.curves.model_copy(update={"host": host})
    return one.model_copy(update={"gpu": one.gpu.model_copy(update={"curves": curves})})


def shards_of(dense: float, expert: float = 0.0) -> ParameterShards:
    return ParameterShards(*(np.array([[v]]) for v in (dense, expert, 1.0, 1.0)))


def tensors_of(first: float, second: float = 0.0) -> SteppedTensors:
    return SteppedTensors(np.array([[first]]), np.array([[second]]))


def test_distributed_parameters_cost_the_host_more() -> None:
    """torchtitan's 100 tensors: two loops each, and as distributed tensors 120 us more; a lead hides as much."""
    one = one_gpu(tensor_pass_s=1e-6, dtensor_step_s=120e-6)
    job = (JOB, one, framework("torchtitan"), shards_of(0.0), "mixed", np.array([[3]]))
    tensors, lead = tensors_of(100.0), np.array([[0.002]])
    waits = [float(optimizer_waits_for_host_s(*job, tensors, lead * n, np.array([0]), way)[0, 0])
             for way, n in ((False, 0), (True, 0), (True, 1))]  # fmt: skip
    assert waits == pytest.approx([0.0002, 0.0122, 0.0102])


def waited(name: str, *, tensors: float, lead_s: float = 0.0, dense: float = 0.0, **options: Any) -> float:
    """Microseconds that the device waits for an optimizer of so many tensors: 6 us a loop, 5 us an op, 9 us a read."""
    one = one_gpu(tensor_pass_s=6e-6, eager_op_s=5e-6, item_s=9e-6)
    seconds = optimizer_waits_for_host_s(
        JOB, one, framework(name, **options), shards_of(dense), "mixed", np.array([[1]]), tensors_of(tensors),
        np.array([[lead_s]]), np.zeros(1, dtype=np.intp),
    )  # fmt: skip
    return float(seconds[0, 0]) * 1e6


def step_lead_us(name: str, *, tensors: float, adam_s: float, copy_s: float = 0.0, zero_s: float = 0.0) -> float:
    """How far a host of 6 us a loop and 5 us an op is ahead as a step begins. [us]"""
    one = one_gpu(tensor_pass_s=6e-6, eager_op_s=5e-6)
    parts = {name: np.array([[s]]) for name, s in (("adam", adam_s), ("copy", copy_s), ("zero", zero_s))}
    shards = shards_of(4.0 * PARAMS_A_LAUNCH)
    lead_s = host_lead_behind_optimizer_s(one, framework(name), shards, np.array([[1]]), tensors_of(tensors), parts)
    return float(lead_s[0, 0]) * 1e6


def test_the_host_begins_a_step_ahead_by_what_the_device_has_of_the_optimizer() -> None:
    """Four launches of Adam, 11 us a tensor for copies and 12 for the next step's loops; torchtitan waits there."""
    lead = step_lead_us("megatron", tensors=100, adam_s=20e-3, copy_s=3e-3, zero_s=2e-3)
    assert lead == pytest.approx(25_000 - 4 * 5 - 100 * (11 + 12))
    assert step_lead_us("torchtitan", tensors=100, adam_s=20e-3) == 0.0


def test_a_host_with_many_tensors_begins_a_step_behind_its_device() -> None:
    """The device is done as the last copy is launched; the loops are left."""
    assert step_lead_us("megatron", tensors=1000, adam_s=1e-3) == pytest.approx(-1000 * 12)


def test_megatrons_optimizer_loops_over_the_tensors() -> None:
    """Local spec: 5 loops, a loop with the norms, a read of each, a loop with two ops that clip, 2 loops of Adam, one
    with a copy: 10 loops, 4 ops, 1 read. With one kernel for norm and clipping 8 loops and the copy are left."""
    local = {share: waited("megatron-local", tensors=100, clipped_steps=share) for share in (0.0, 0.25, 1.0)}
    assert local[1.0] == pytest.approx(100 * (10 * 6 + 4 * 5 + 9))
    assert local[0.0] == pytest.approx(100 * (9 * 6 + 2 * 5 + 9))
    assert local[0.25] == pytest.approx(0.25 * local[1.0] + 0.75 * local[0.0])
    assert waited("megatron", tensors=100, optimizer="te") == pytest.approx(100 * (8 * 6 + 5))


def test_a_host_ahead_hides_what_comes_before_the_first_read() -> None:
    """5 loops, one with the norms: 41 us a tensor. The reads and Adam's loops no lead hides."""
    ahead = waited("megatron-local", tensors=100, lead_s=1.0)
    assert waited("megatron-local", tensors=100) - ahead == pytest.approx(100 * (6 * 6 + 5))


def test_large_kernels_hide_clipping_and_the_copies() -> None:
    """A billion parameters: 1 ms for norms, 2 to scale, more for Adam; left are 9 + 12 us a tensor."""
    clips = waited("megatron-local", tensors=10, dense=1e9, clipped_steps=1.0)
    assert clips == pytest.approx(10 * (9 + 12))


def test_torchtitans_optimizer_reads_nothing() -> None:
    assert waited("torchtitan", tensors=100) == pytest.approx(100 * 2 * 6)
    assert waited("torchtitan", tensors=100, dense=1e9) == 0.0


@pytest.mark.parametrize(("split", "behind_norm"), [(False, 2010 * 12), (True, 2010 * 6 + 10 * 6)])
def test_lists_of_an_optimizer_of_its_own_are_made_beside_the_other(split: bool, behind_norm: float) -> None:
    """10 tensors whose kernels take 1 s and 2,000 experts' that take as long: lists of the experts cost no time, clips
    do; in one optimizer nothing is launched before all lists are there."""
    tensors = tensors_of(10.0, 2000.0) if split else tensors_of(2010.0)
    large = 1.0 * PARAMS_A_LAUNCH
    seconds = optimizer_waits_for_host_s(
        JOB, one_gpu(tensor_pass_s=6e-6, eager_op_s=0.0), framework("megatron"), shards_of(large, large), "mixed",
        np.array([[1]]), tensors, np.array([[1.0]]), np.zeros(1, dtype=np.intp),
        parts={"adam": np.array([[2.0]]), "copy": np.array([[2.0]])},
    )  # fmt: skip
    assert float(seconds[0, 0]) * 1e6 == pytest.approx(behind_norm, abs=8)


def timed_parts() -> dict[str, dict[str, float]]:
    """Parts of timed steps, a tensor and by the small op beside them, less what the host waited for; by run. [-]"""
    made: dict[str, dict[str, float]] = defaultdict(dict)
    with (ROOT / "measurements" / "h200-step-segments" / "segments.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            seconds = float(row["seconds"]) - float(row["waited_s"])
            made[row["run"]][row["part"]] = seconds / float(row["tensors"]) / float(row["host_issue_s"])
    return dict(made)


def test_times_of_the_fused_optimizer_are_those_of_timed_steps() -> None:
    """Medians over the runs, each by its small op, on the host of the profile; Adam's launches come off its lists."""
    host = load_yaml(ROOT / "hardware_profiles" / "hosts" / "xeon-8480c.yaml")
    op_s = parse_quantity(host["eager_op_s"]["value"], "s")
    facts = {name: parse_quantity(fact["value"], "s") / op_s for name, fact in host["fused_optimizer"].items()}
    runs = timed_parts().values()
    assert len(runs) >= 7
    medians = {
        "before_norm_s": median(run["prepare"] for run in runs) + median(run["norm"] for run in runs),
        "clip_s": median(run["optimizer"] - run["prepare"] - run["norm"] - run["ready"] for run in runs),
        "lists_s": median(run["adam"] for run in runs) - 0.1,  # launches: a tensor has a tenth of one's parameters
        "copy_s": median(run["copy"] for run in runs),
        "reset_s": median(run["zero_grad"] for run in runs) + median(run["zero_buffer"] for run in runs),
    }
    assert facts == pytest.approx(medians, rel=0.03)


def test_a_whole_step_of_the_optimizer_takes_what_its_parts_do() -> None:
    """Of each timed run within a quarter, but for those of fewer than 200 tensors, where calls weigh more."""
    machines = load_cluster("h200-hgx", 1)
    issue = optimizer_issue_times_per_tensor(machines, load_framework("megatron"))
    op_s = machines.slowest_host_factor * machines.gpu.curves.host.eager_op_s.value
    told = (issue.before_norm_s + issue.clip_s + issue.lists_s + issue.copy_s) / op_s
    many = {run: parts["optimizer"] for run, parts in timed_parts().items() if "jetmoe" not in run and "05b" not in run}
    assert {run: told / taken - 1 for run, taken in many.items()} == pytest.approx(dict.fromkeys(many, 0.0), abs=0.25)


@pytest.mark.parametrize(("strategy", "least", "most"), [("dp=8", 98, 163), ("tp=2 sp=true dp=4", 65, 159)])
def test_a_rank_steps_its_share_of_the_tensors(strategy: str, least: int, most: int) -> None:
    """Llama 3 8B has 195 tensors; the fewest and most with states on one rank, as the replay deals buckets out."""
    job, machines, megatron = load_workload("llama3-8b"), load_cluster("h100-hgx", 8), load_framework("megatron")
    estimator = strategy_estimator(job, machines, megatron, strategy)
    stepped = num_stepped_tensors(gathered_row_of_strategy(estimator))
    assert least <= stepped.total[0, 0] <= most
