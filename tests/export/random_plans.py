"""Random plans of random jobs, drawn by a seed: what an export must say, and read back as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import mofa
from mofa.errors import SpecError
from mofa.plan.result import Plan
from mofa.search.one_plan import plan_in_closed_form
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.workload import WorkloadSpec

NODES = {1: "h100-hgx", 2: "h100-hgx", 8: "h100-hgx", 16: "h100-hgx", 64: "h100-hgx", 512: "h800-hgx"}
"""Node types by number of GPUs."""


class Drawn(NamedTuple):
    """A plan with its job."""

    workload: WorkloadSpec
    cluster: ClusterSpec
    framework: FrameworkSpec
    plan: Plan


def drawn_plans(
    framework: str, workloads: list[str], options: dict[str, list[Any]], strategies: dict[str, list[Any]], seed: int
) -> Iterator[Drawn]:
    """Plans without end: each of a random workload, GPUs, options of the framework and strategy that it can run."""
    rng = random.Random(seed)
    while True:
        gpus = rng.choice(list(NODES))
        seq_len, batch = rng.choice([2048, 4096]), gpus * rng.choice([4, 8, 16])
        try:
            workload = mofa.load_workload(
                rng.choice(workloads), seq_len=seq_len, global_batch=batch, overrides=_chosen(rng, _of_job(framework))
            )
            cluster = mofa.load_cluster(NODES[gpus], gpus)
            facts = mofa.load_framework(framework, _chosen(rng, options))
            plan = plan_in_closed_form(workload, cluster, _strategy(rng, strategies), facts)
        except SpecError:
            continue
        if facts.tp_overlap and not (plan.strategy.sp and plan.strategy.tp > 1):
            continue  # Megatron-LM refuses it
        if facts.data_parallel == "ddp" and facts.traits.leaves_lone_ranks_whole and gpus == 1:
            continue  # torchtitan wraps no lone replica
        if workload.model.max_positions is not None and workload.model.max_positions < seq_len:
            continue  # and so does it this
        yield Drawn(workload, cluster, facts, plan)


def _of_job(framework: str) -> dict[str, list[Any]]:
    if framework == "megatron":
        return {
            "precision.gemm": ["bf16", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise"],
            "precision.moments": ["fp32", "bf16"],
            "optimizer.clip_grad_norm": [True, False],
        }
    return {"precision.params": ["fp32", "bf16"]}


def _chosen(rng: random.Random, options: dict[str, list[Any]]) -> dict[str, Any]:
    """Some options away from their defaults."""
    return {name: rng.choice(values) for name, values in options.items() if rng.random() < 0.4}


def _strategy(rng: random.Random, strategies: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in strategies.items()} | {"micro_batch": rng.choice([1, 1, 2])}
