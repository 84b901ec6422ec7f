"""No row costs less than its lower bounds say."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from mofa.blocks.frameworks.recompute import largest_step_share_saved_by_recomputing
from mofa.cost.breakdown import TIME_COMPONENTS
from mofa.cost.estimate import TableEstimator
from mofa.cost.lower_bounds.paired_layers import least_seconds_in_pairs
from mofa.cost.lower_bounds.static_memory import memory_lower_bounds
from mofa.cost.lower_bounds.steps import step_lower_bounds_s, weighted_computing_lower_bounds
from mofa.search.job_setup import routing_loads_by_ep, with_numerics
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.space import SOLVED, combinations_table, constrain_space, default_space, with_first_option_set
from mofa.specs.load import load_cluster, load_framework, load_workload
from mofa.specs.strategy import RecomputeSpec
from tests.cost.toy import fast_hosts

ROWS = 80
"""Random legal rows of each job. [-]"""
MAXIMUM = {"cp": 2, "vpp": 2, "pp": 8}
"""Longer rings and pipelines and more chunks are of the same kinds."""
WEIGHTS = {"gemm": 0.8, "grouped_gemm": 0.8, "attention": 0.8, "recompute": 0.8, "stragglers": 0.8, "memory_bound": 0.4}


class Case(NamedTuple):
    """A workload on so many H100s, a framework, words of ``--with`` and what is fixed."""

    workload: str
    gpus: int
    framework: str
    words: tuple[str, ...] = ()
    fix: tuple[tuple[str, object], ...] = ()
    options: tuple[tuple[str, object], ...] = ()
    without: tuple[str, ...] = ()
    machines: tuple[tuple[str, float], ...] = ()
    """What is changed of the H100s."""


STRAGGLERS = (
    ("node.slow_nodes.share", 0.05), ("node.slow_nodes.slowdown", 0.2), ("gpu.curves.step_jitter", 0.02),
)  # fmt: skip
CASES = [
    Case("llama3-8b", 64, "megatron"),
    Case("llama3-8b", 64, "megatron", fix=(("tp_overlap", True),)),
    Case("llama3-8b", 64, "megatron", machines=STRAGGLERS),
    Case("llama3-8b", 8, "megatron-local"),
    Case("llama3-8b", 64, "torchtitan"),
    Case("llama3-8b", 64, "torchtitan", fix=(("schedule", "interleaved-zb"),)),
    Case("llama3-8b", 32, "torchtitan", fix=(("schedule", "gpipe"),)),
    Case("llama3-8b", 64, "torchtitan", fix=(("dp_replicate", 4),), without=("zbv",)),
    Case("llama3-8b", 64, "fsdp1"),
    Case("mixtral-8x7b", 32, "torchtitan"),
    Case("llama3-70b", 256, "megatron", ("fp8-blockwise",)),
    Case("llama3-8b", 64, "megatron-2022", options=(("deepspeed", "bf16"),)),
    Case("qwen3-30b-a3b", 64, "megatron", ("token_chunks", "moeblaze")),
    Case("qwen3-30b-a3b", 64, "megatron", fix=(("dispatcher", "allgather"), ("tp_overlap", True))),
    Case("qwen3-30b-a3b", 64, "megatron", ("expert_overlap",)),
    Case("qwen3-30b-a3b", 64, "torchtitan", ("deepep",), without=("zbv",)),
    Case("qwen3-30b-a3b", 64, "torchtitan", fix=(("schedule", "zbv"), ("recompute", "none"))),
    Case("mixtral-8x7b", 64, "megatron-local", ("micro_moe",)),
    Case("deepseek-v3", 1024, "megatron", ("deepep", "bf16_moments")),
    Case("llama3-8b", 8, "megatron", ("cuda_graphs",)),
    Case("qwen3-30b-a3b", 64, "megatron", ("cuda_graphs",)),
    Case("llama3-8b", 8, "megatron", fix=(("pp", 1),), options=(("cuda_graphs", "local:full_iteration"),)),
    Case("deepseek-v3", 1024, "megatron", ("deepep", "expert_overlap")),
    Case("llama3-8b", 64, "megatron", ("activation_offload",)),
    Case("qwen3-30b-a3b", 64, "megatron", ("activation_offload",)),
]


ON_FAST_HOSTS = {Case("qwen3-30b-a3b", 64, "megatron", ("expert_overlap",))}
"""Where hosts are late in half of the steps, which bounds of devices' time know nothing of."""


class Sample:
    """Random legal rows of a job, those whose recomputed layers are open with 1 to 3 of them."""

    def __init__(self, case: Case) -> None:
        asked = load_framework({"name": case.framework, **dict(case.options)})
        machines = load_cluster("h100-hgx", case.gpus, dict(case.machines) or None)
        if case in ON_FAST_HOSTS:
            machines = fast_hosts(machines)
        self.workload, self.cluster, self.framework = with_numerics(
            load_workload(case.workload), machines, asked, case.words
        )
        space = default_space(self.workload, self.cluster, self.framework)
        space = constrain_space(space, fix=dict(case.fix), maximum=MAXIMUM, with_=case.words, without=case.without)
        table = combinations_table(with_first_option_set(space), self.cluster, self.framework)
        legal = np.flatnonzero(
            check_strategies(JobAndMachines(self.workload, self.cluster, self.framework), table).reason < 0
        )
        random = np.random.default_rng(case.gpus)
        table = table.select_rows(np.sort(random.choice(legal, min(ROWS, len(legal)), replace=False)))
        self.is_open: NDArray[np.bool_] = table.recompute_layers == SOLVED
        self.layers = np.where(self.is_open, random.integers(1, 4, len(table)), table.recompute_layers)
        self.table = table
        self.estimator = TableEstimator(
            self.workload, self.cluster, self.framework, table, routing_loads_by_ep(self.workload, table)
        )  # fmt: skip
        self.exposed_s = self.estimator.exposed_and_hidden_seconds(recompute_layers=self.layers)[0]


def _name(case: Case) -> str:
    return "-".join(
        [
            case.workload,
            case.framework,
            *case.words,
            *(str(value) for _, value in case.fix + case.options + case.machines),
        ]
    )


def _halves_backwards(case: Case) -> bool:
    return ("schedule", "interleaved-zb") in case.fix


def _gathers_tokens(case: Case) -> bool:
    """Of many small experts whose exchanges hide less: 0.78 by all-to-alls too."""
    return ("dispatcher", "allgather") in case.fix


@cache
def sample(case: Case) -> Sample:
    return Sample(case)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_no_step_is_below_its_bound(case: Case) -> None:
    some = sample(case)
    step_s = some.exposed_s.sum(axis=0)
    close, rough = (step_lower_bounds_s(some.estimator, some.is_open, at_rest=at_rest) for at_rest in (True, False))
    assert len(step_s) >= 10
    assert np.all(close <= step_s)
    assert np.all(rough <= close)
    loose = _gathers_tokens(case) or "activation_offload" in case.words  # copies to hosts wait for each other
    assert np.median(close / step_s) > (0.3 if _halves_backwards(case) else 0.7 if loose else 0.8)


@pytest.mark.parametrize("case", [case for case in CASES if "expert_overlap" in case.words], ids=_name)
def test_a_row_costs_alone_what_it_costs_among_others(case: Case) -> None:
    """Which op of a part comes first differs from row to row: each pays for the part's own backward once."""
    some = sample(case)
    step_s = some.exposed_s.sum(axis=0)
    for row in range(0, len(step_s), 4):
        table = some.table.select_rows(np.array([row]))
        loads = routing_loads_by_ep(some.workload, table)
        estimator = TableEstimator(some.workload, some.cluster, some.framework, table, loads)
        alone = estimator.exposed_and_hidden_seconds(recompute_layers=some.layers[[row]])[0]
        assert float(alone.sum()) == pytest.approx(float(step_s[row]), rel=1e-9)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_no_rank_computes_less_than_its_bound(case: Case) -> None:
    some = sample(case)
    computing = sum(weight * some.exposed_s[TIME_COMPONENTS.index(name)] for name, weight in WEIGHTS.items())
    bound = weighted_computing_lower_bounds(some.estimator, some.is_open, WEIGHTS)
    assert np.all(bound <= computing)
    assert np.median(bound / computing) > (0.2 if _halves_backwards(case) else 0.75)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_no_memory_is_below_its_bound(case: Case) -> None:
    some = sample(case)
    bounds = memory_lower_bounds(some.workload, some.cluster, some.estimator.framework, some.table)
    weighed = some.estimator.memory_of_rows(np.arange(len(some.table)), some.layers)
    assert np.all(bounds.least_bytes <= weighed.least_bytes * (1 + 1e-12))
    assert np.all(bounds.device_bytes <= weighed.device_bytes * (1 + 1e-12))
    assert np.all(bounds.least_bytes > 0.0)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_recomputing_makes_nothing_much_faster(case: Case) -> None:
    """What lets a search bound degrees in one mode for all."""
    some = sample(case)
    for part in some.estimator.parts:
        least_s = part.layers.stack_of_blocks(
            lambda cost: sum(np.minimum(way.total_s, way.clocks[0]) for way in (cost.forward, cost.backward))
        )
        if some.framework.expert_overlap == "combined":
            least_s = least_seconds_in_pairs(part.costs)
        for number, mode in enumerate(part.modes):
            none = RecomputeSpec(token_chunks=mode.token_chunks)
            if none in part.modes:
                least = least_s[part.modes.index(none)] * (
                    1.0 - largest_step_share_saved_by_recomputing(some.framework)
                )
                assert np.all(least_s[number] >= least), mode.text
