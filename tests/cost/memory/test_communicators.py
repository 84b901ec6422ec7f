"""Device memory of communicators by hand, by where their ranks are and what they do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mofa
from mofa.cost.kernels.topology import NodeSizes, process_groups
from mofa.cost.memory.communicators import communicator_bytes, pipeline_links
from mofa.replay.rank.from_estimator import outside_allocator_bytes
from mofa.schedules import SCHEDULES
from mofa.search.strategy_estimator import strategy_estimator
from mofa.specs.strategy import CP_KINDS

MIB = 1 << 20
JEAN_ZAY = Path(__file__).parents[3] / "reference_runs/published/hardware/a100-jean-zay.yaml"


def _communicators(gpus: int, strategy: dict[str, int]) -> float:
    job = mofa.load_workload(
        "gpt3-175b", seq_len=2048, global_batch=96, overrides={"model": {"num_layers": 24, "tied_embeddings": True}}
    )
    framework = mofa.load_framework("megatron-2022", overrides={"deepspeed": "bf16"})
    cluster = mofa.load_cluster(JEAN_ZAY, gpus)
    return (
        outside_allocator_bytes(strategy_estimator(job, cluster, framework, {**strategy, "recompute": "full"}))[1][0]
        / MIB
    )


def _on_h200(name: str, degrees: tuple[int, ...], *, experts: bool, schedule: str = "1f1b", shard: int = 0,
             deepspeed: bool = False, dispatcher: str = "alltoall", made: str = "lazy",
             cp_kind: str = "ring") -> list[float]:  # fmt: skip
    """(tp, cp, pp, dp, ep, etp) inside one node of H200, every rank of the pipeline. [MiB]"""
    groups = process_groups(*(np.array([v]) for v in degrees), NodeSizes(8, 8), np.array([shard]) if shard else None)
    framework = mofa.load_framework(name, overrides={"dispatcher": dispatcher} if name == "megatron" else {})
    framework = framework.model_copy(update={"deepspeed": "bf16"}) if deepspeed else framework
    framework = framework.model_copy(update={"process_groups": made})
    pp = degrees[2]
    pipeline = pipeline_links(SCHEDULES[schedule].wraps_around, pp, pp - 1, np.arange(pp))
    cluster = mofa.load_cluster("h200-hgx", 8)
    kind = np.array([CP_KINDS.index(cp_kind)])
    return [x / MIB for x in communicator_bytes(groups, cluster, framework, experts, np.array([0]), pipeline, kind)[0]]


CONTEXT = 767
"""Device minus reserved memory of torchtitan on one GPU, without communicators. [MiB]"""


@pytest.mark.parametrize(
    ("degrees", "experts", "shard", "measured"),
    [
        ((1, 1, 1, 1, 1, 1), False, 0, 767),
        ((1, 1, 1, 2, 1, 1), False, 0, 1609),  # the world's alone: a mesh of all ranks is the world's
        ((1, 1, 1, 4, 1, 1), False, 0, 1611),
        ((1, 1, 1, 4, 1, 1), False, 2, 2581),  # hybrid: two more
        ((1, 2, 1, 1, 1, 1), False, 0, 2057),  # the world's, with sends to one peer
        ((1, 1, 1, 4, 4, 1), True, 0, 2827),  # and to three
        ((1, 1, 1, 4, 2, 1), True, 0, 2741),  # experts' own sends alone; their shards
        ((2, 2, 1, 1, 1, 1), False, 0, 3513),  # tp, shards, cp
        ((2, 1, 1, 2, 4, 1), True, 0, 4281),  # tp, shards, the data's
        ((2, 1, 1, 2, 2, 2), True, 0, 4483),  # and etp, and the experts' with their norm
        ((1, 1, 2, 2, 2, 1), True, 0, 4579),  # shards, the data's, pp, the loss', and the experts' sends alone
    ],
)
def test_torchtitans_are_those_measured(degrees: tuple[int, ...], experts: bool, shard: int, measured: float) -> None:
    """Device minus reserved memory of the fitting half of reference_runs/measured on H200, within 10 MiB. [MiB]"""
    for found in _on_h200("torchtitan", degrees, experts=experts, shard=shard):
        assert CONTEXT + found == pytest.approx(measured, abs=10)


@pytest.mark.parametrize(
    ("degrees", "experts", "schedule", "measured"),
    [
        ((1, 1, 1, 1, 1, 1), False, "1f1b", [2492]),
        ((2, 1, 1, 1, 1, 1), False, "1f1b", [2968]),
        ((1, 1, 1, 4, 1, 1), False, "1f1b", [2872]),  # without sharded states the norm's has one rank
        ((1, 1, 2, 1, 1, 1), True, "1f1b", [3130, 3520]),  # the loss' on the last stage
        ((1, 1, 2, 1, 1, 1), True, "interleaved", [3328, 3720]),
        ((1, 1, 4, 1, 1, 1), False, "interleaved", [3708, 3706, 3706, 4096]),
        ((1, 1, 2, 2, 1, 1), False, "1f1b", [3222, 3612]),
        ((2, 1, 2, 1, 1, 1), False, "1f1b", [3612, 3612]),
        ((2, 1, 1, 1, 2, 1), True, "1f1b", [4488]),
        ((2, 1, 2, 1, 1, 2), True, "1f1b", [4582, 4584]),
    ],
)
def test_megatrons_are_those_measured(
    degrees: tuple[int, ...], experts: bool, schedule: str, measured: list[float]
) -> None:
    """Device minus reserved memory of the fitting half of reference_runs/measured on H200, within 10 MiB. [MiB]"""
    found = _on_h200("megatron", degrees, experts=experts, schedule=schedule)
    assert [CONTEXT + x for x in found] == pytest.approx(measured, abs=10)


def test_gathering_tokens_needs_no_sends() -> None:
    sent = _on_h200("megatron", (1, 1, 1, 2, 2, 1), experts=True)[0]
    gathered = _on_h200("megatron", (1, 1, 1, 2, 2, 1), experts=True, dispatcher="allgather")[0]
    assert sent - gathered == pytest.approx(4486 - 3844, abs=10)  # measured; the sends' communicator, a peer, the first


def test_the_ends_of_a_pipeline_have_one_neighbour() -> None:
    first, second, third, last = _on_h200("torchtitan", (1, 1, 4, 1, 1, 1), experts=False)
    assert first == last == second - 384 == third - 384


@pytest.mark.parametrize(
    ("degrees", "groups"),
    [
        # world, dp-cp, dp, cp, mp, tp, pp, embedding, position embedding, tp-dp-cp, tp-dp, tp-cp, ep, expert tp, tp-ep,
        # tp-ep-pp, expert dp, the optimizer's instance: lone ones 390, of several ranks 198 and 288 more where
        # collectives run, what NCCL loads once 165
        ((1, 1, 1, 1, 1, 1), [18 * 390 + 165]),
        ((1, 1, 1, 2, 1, 1), [7 * 198 + 2 * 288 + 11 * 390 + 165 + 188]),  # the world's, dp-cp
        # the world, mp, tp, tp-dp-cp, tp-dp, tp-cp, the optimizer's, and of experts tp, tp-ep, tp-ep-pp
        ((2, 1, 1, 1, 1, 2), [10 * 198 + 3 * 288 + 8 * 390 + 165 + 188]),  # the world's, the norm's, tp
        # the world, mp, pp, embedding, tp-ep-pp, the optimizer's; the first stage's own position embedding; one peer
        ((1, 1, 2, 1, 1, 1), [6 * 198 + 2 * 288 + n * 390 + 165 + 188 + 384 + 64 for n in (12, 11)]),
    ],
)
def test_eager_groups_by_hand(degrees: tuple[int, ...], groups: list[float]) -> None:
    """All that ``initialize_model_parallel`` makes (megatron_core 0.16.1, parallel_state.py), on H200. [MiB]"""
    assert _on_h200("megatron", degrees, experts=False, made="eager") == pytest.approx(groups)


@pytest.mark.parametrize(
    ("cp", "kind", "more"),
    [
        (2, "ring", 198 + 384 + 64),  # a batch of sends in the group's own communicator
        (4, "ring", 2 * (198 + 384) + 64),  # one with each neighbour
        (4, "a2a", 198 + 3 * 384 + 64),
        (4, "allgather", 486),
    ],
)
def test_context_parallel_group(cp: int, kind: str, more: float) -> None:
    """Beside the same ranks of data parallelism, whose groups are as many and as large. [MiB]"""
    data = _on_h200("megatron", (1, 1, 1, cp, 1, 1), experts=False)[0]
    assert _on_h200("megatron", (1, cp, 1, 1, 1, 1), experts=False, cp_kind=kind)[0] - data == pytest.approx(more)


@pytest.mark.parametrize(("tp", "pp", "more"), [(1, 1, 0), (2, 1, 1), (1, 2, 4), (2, 2, 5)])
def test_deepspeeds_are_beside_megatrons(tp: int, pp: int, more: int) -> None:
    """The model; of pipelines slices of what is sent, both frameworks' and the embedding's stages."""
    plain, with_it = (
        _on_h200("megatron-2022", (tp, 1, pp, 2, 1, 1), experts=False, deepspeed=there)[-1] for there in (False, True)
    )
    data_for_norm = 96 if tp * pp == 1 else 0  # two ranks of data for one of the model
    assert with_it - plain == 486 * more + data_for_norm


@pytest.mark.parametrize(
    ("gpus", "strategy", "expected"),
    [
        # one node: all, tensor and model parallel: 576 each; two of data parallelism with a single rank: 32
        (8, {"tp": 8, "pp": 1}, 3 * 576 + 2 * 32),
        # 12 nodes: tensor parallel and slices 576; all and the model 48; data parallel twice, pipeline twice and the
        # tied embedding 32; the direct sends of the first stage one peer of 16
        (96, {"tp": 8, "pp": 12}, 2 * 576 + 2 * 48 + 5 * 32 + 16),
    ],
)
def test_groups_of_one_node_hold_more_than_those_of_several(
    gpus: int, strategy: dict[str, int], expected: float
) -> None:
    assert _communicators(gpus, strategy) == pytest.approx(expected)
