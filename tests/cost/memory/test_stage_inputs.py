"""What Megatron's pipelines hold beside their passes, against what runs of Megatron-Core 0.16.1 allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

import mofa
from mofa.cost.rank_rules import HeldInputCounts, held_input_counts
from mofa.schedules.interleaved import INTERLEAVED
from mofa.schedules.one_f_one_b import ONE_F_ONE_B
from tests.committed import read_yaml

RUNS = Path(__file__).parents[3] / "reference_runs" / "measured"


def test_others_hold_none() -> None:
    """torchtitan's buffers are its own; one stage hands on nothing."""
    megatron, titan = mofa.load_framework("megatron"), mofa.load_framework("torchtitan")
    assert (
        held_input_counts(titan, ONE_F_ONE_B, 2, 1)
        == held_input_counts(megatron, ONE_F_ONE_B, 1, 0)
        == HeldInputCounts()
    )
    assert held_input_counts(megatron, INTERLEAVED, 4, 8) == HeldInputCounts(3, 13)


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("mc2-pp2-llama-16l", (0.1, 0.1)),  # 1F1B: the last stage's last input and its gradient
        ("mc2-pp2-smollm-24l-4k-tied", (0.1, 0.1)),
        ("mc4-tp2-pp2-llama-16l-full", (0.1, 0.1)),
        ("mc2-pp2-vpp2-llama-16l", (0.1, 1.1)),  # of the last rank's loss one is not explained
        ("mc2-pp2-vpp2-llama-12l-full", (0.9, 0.2)),  # at the step's end: two a chunk that receives
    ],
)
def test_allocated_is_what_was_measured(name: str, within: tuple[float, float]) -> None:
    """Peak allocated of the first and of the last rank, in tensors of the size of what is handed on."""
    path = RUNS / f"{name}.yaml"
    job, machines, framework, strategy = mofa.resolve_run(mofa.load_runs(path)[0], RUNS)
    plan = mofa.estimate(job, machines, strategy, framework=framework)
    ranks = read_yaml(path)["measured"]["ranks"]
    parts = strategy.tp if strategy.sp else 1
    boundary = 2 * strategy.micro_batch * job.batch.seq_len * job.model.hidden / parts
    for stage, rank, most in zip(
        (plan.memory.by_stage[0], plan.memory.by_stage[-1]), (ranks[0], ranks[-1]), within, strict=True
    ):
        assert (rank["peak_allocated_bytes"] - stage.allocated_bytes) / boundary == pytest.approx(0.0, abs=most)
