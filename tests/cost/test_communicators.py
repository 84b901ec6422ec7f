"""Device memory of communicators by hand, by where their ranks are."""

from __future__ import annotations

from pathlib import Path

import pytest

import mofa
from mofa.replay.ranks import outside_of
from mofa.search.playing import estimator_of

MIB = 1 << 20
JEAN_ZAY = Path(__file__).parents[2] / "reference_runs/published/hardware/a100-jean-zay.yaml"


def _communicators(gpus: int, strategy: dict[str, int]) -> float:
    job = mofa.load_workload(
        "gpt3-175b", seq_len=2048, global_batch=96, overrides={"model": {"num_layers": 24, "tied_embeddings": True}}
    )
    framework = mofa.load_framework("megatron-2022", overrides={"deepspeed": "bf16"})
    cluster = mofa.load_cluster(JEAN_ZAY, gpus)
    return outside_of(estimator_of(job, cluster, framework, {**strategy, "recompute": "full"}))[1] / MIB


@pytest.mark.parametrize(
    ("gpus", "strategy", "expected"),
    [
        # one node: all, tensor and model parallel, slices: 576 each; two of data parallelism with a single rank: 32
        (8, {"tp": 8, "pp": 1}, 4 * 576 + 2 * 32),
        # 12 nodes: tensor parallel and slices 576; all and the model 192; data parallel twice, pipeline twice and the
        # tied embedding 32; the direct sends of stages two peers of 16
        (96, {"tp": 8, "pp": 12}, 2 * 576 + 2 * 192 + 5 * 32 + 2 * 16),
    ],
)
def test_groups_of_one_node_hold_more_than_those_of_several(
    gpus: int, strategy: dict[str, int], expected: float
) -> None:
    assert _communicators(gpus, strategy) == pytest.approx(expected)
