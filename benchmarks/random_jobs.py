"""Random legal jobs, uniform over each field: workload, node, GPUs, batch, sequence, framework and strategy.

Fields of the job are drawn first. Of the strategies that are legal for it, fields are drawn one after the other in
random order, each uniformly from the values that the fields before it leave. A job depends on the seed and its number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.frameworks.recompute import selective_modes_to_search
from mofa.errors import MofaError, SpecError
from mofa.schedules import SCHEDULE_NAMES
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.legality.step_length import computations_per_step
from mofa.specs.framework import FRAMEWORK_NAMES, FrameworkSpec
from mofa.specs.framework_offers import OFFERED
from mofa.specs.load import load_cluster, load_framework, load_workload
from mofa.specs.strategy import COLUMNS, CP_KINDS, FrameworkOptions, RecomputeSpec, StrategyTable
from mofa.specs.strategy_defaults import default_zero_stage
from mofa.specs.workload import WorkloadSpec

ROOT = Path(__file__).parents[1]
WORKLOADS = tuple(path.stem for path in sorted((ROOT / "workloads").glob("*.yaml")))
NODES = tuple(path.stem for path in sorted((ROOT / "hardware_profiles" / "nodes").glob("*.yaml")))
GPUS = tuple(2**i for i in range(10))
SEQ_LENS = tuple(2**i for i in range(9, 16))
GLOBAL_BATCHES = tuple(2**i for i in range(11))
MAX_COMPUTATIONS = 8192
"""Forwards and backwards of all ranks in a step of a job that is played; longer ones are drawn anew and counted."""
TRIED_ROWS = 20_000
"""Strategies drawn for a job, among which the legal ones are looked for."""
MOST_DRAWS = 400


@dataclass(frozen=True)
class RandomJob:
    """A job with one legal strategy."""

    job: JobAndMachines
    row: StrategyTable
    skipped: int
    """Draws before it that were too long to play."""


def random_job(seed: int, number: int, again: int = 0) -> RandomJob:
    """The job of a seed and a number, or what is drawn in its place the ``again``-th time.

    Raises
    ------
    RuntimeError
        If no legal job comes up.
    """
    random = np.random.default_rng((seed, number, again))
    skipped = 0
    for _ in range(MOST_DRAWS):
        try:
            job = _drawn_job(random)
        except MofaError:  # a framework that does not run there
            continue
        row = _drawn_strategy(random, job)
        if row is None:
            continue
        if computations_per_step(job, row)[0] > MAX_COMPUTATIONS:
            skipped += 1
            continue
        return RandomJob(job, row, skipped)
    raise RuntimeError(f"no legal job of seed {seed}, number {number}")


def _drawn_job(random: np.random.Generator) -> JobAndMachines:
    name, node = str(random.choice(WORKLOADS)), str(random.choice(NODES))
    family = FRAMEWORK_NAMES[random.integers(len(FRAMEWORK_NAMES))]
    data_parallel = str(random.choice(OFFERED[family]["data_parallel"]))
    options: dict[str, object] = {"name": family, "balances_by": "turn", "data_parallel": data_parallel}
    if data_parallel == "hsdp":
        options["dp_replicate"] = int(random.choice((2, 4)))
    batch, seq_len, gpus = (int(random.choice(values)) for values in (GLOBAL_BATCHES, SEQ_LENS, GPUS))
    framework, cluster = load_framework(options), load_cluster(node, gpus)
    if cluster.gpu.software == "rocm" and not framework.traits.runs_on_rocm:
        raise SpecError(f"{node}: {family} does not run on it")
    return JobAndMachines(_workload(name, batch, seq_len), cluster, framework)


@cache
def _workload(name: str, batch: int, seq_len: int) -> WorkloadSpec:
    return load_workload(name, global_batch=batch, seq_len=seq_len)


def _modes(job: JobAndMachines) -> tuple[RecomputeSpec, ...]:
    """Modes of recomputation that a framework may have, each in one token chunk or several."""
    texts = ["none", "full"]
    model, framework = job.workload.model, job.framework
    if framework.traits.has_pytorch_modules:
        specs = [RecomputeSpec.parse(text) for text in (*texts, "ops", "every:2", "every:3")]
    else:
        specs = [RecomputeSpec.parse(text) for text in texts]
        specs += list(selective_modes_to_search(framework, model, job.workload.precision.fp8_recipe))
    chunks = (1, 2, 4) if model.moe is not None and framework.name == "megatron" else (1,)
    return tuple(spec.model_copy(update={"token_chunks": c}) for spec in specs for c in chunks)


def _option_sets(framework: FrameworkSpec, *, experts: bool) -> tuple[FrameworkOptions, ...]:
    """Sets of options that a strategy may choose, as given first."""
    sets = [FrameworkOptions()]
    if framework.name == "megatron":
        sets.append(FrameworkOptions(tp_overlap=True))
    if experts:
        sets += [FrameworkOptions(dispatcher=name) for name in OFFERED[framework.name]["dispatcher"]]  # type: ignore[arg-type]
    return tuple(sets)


def _drawn_strategy(random: np.random.Generator, job: JobAndMachines) -> StrategyTable | None:
    """A legal strategy of a job; None where none of those drawn is."""
    gpus, model, framework = job.cluster.num_gpus, job.workload.model, job.framework
    experts = model.moe.num_experts if model.moe is not None else 1

    def powers(limit: int) -> NDArray[np.int64]:
        return 2 ** random.integers(0, max(min(limit, gpus), 1).bit_length(), TRIED_ROWS)

    lone = framework.traits.has_one_shard_group
    tp, cp, pp, ep, etp = (powers(1 if lone else limit) for limit in (16, 64, 64, experts, 16))
    inside = tp * cp * pp <= gpus
    dp = np.maximum(gpus // (tp * cp * pp), 1)
    modes, sets = _modes(job), _option_sets(framework, experts=model.moe is not None)
    recompute = random.integers(0, len(modes), TRIED_ROWS)
    is_full = np.array([mode.kind == "full" and mode.token_chunks == 1 for mode in modes])[recompute]
    vpp = np.where(random.random(TRIED_ROWS) < 0.5, 1, random.integers(1, 9, TRIED_ROWS))
    some = is_full & (random.random(TRIED_ROWS) < 0.5) & (not framework.traits.has_pytorch_modules)
    columns = {
        "tp": tp, "sp": random.random(TRIED_ROWS) < 0.5, "pp": pp, "vpp": vpp, "cp": cp,
        "cp_kind": np.where(cp > 1, random.integers(0, len(CP_KINDS), TRIED_ROWS), 0), "ep": ep, "etp": etp, "dp": dp,
        "micro_batch": 2 ** random.integers(0, 5, TRIED_ROWS),
        "zero": random.integers(0, 4, TRIED_ROWS), "recompute": recompute,
        "recompute_layers": np.where(some, random.integers(1, 1 + np.maximum(model.num_layers // (pp * vpp), 1)), -1),
        "schedule": random.integers(0, len(SCHEDULE_NAMES), TRIED_ROWS),
        "balancing": ((random.random(TRIED_ROWS) < 0.1) & (model.moe is not None)).astype(int),
        "layout": np.zeros(TRIED_ROWS, int), "options": random.integers(0, len(sets), TRIED_ROWS),
    }  # fmt: skip
    columns["sp"] &= tp > 1
    if framework.traits.has_pytorch_modules:
        columns["cp_kind"] = np.where(cp > 1, CP_KINDS.index("allgather"), 0)
    table = StrategyTable(**columns, recompute_modes=modes, option_sets=sets).select_rows(inside)
    if framework.traits.leaves_lone_ranks_whole and framework.data_parallel != "ddp":
        stages = default_zero_stage(framework, table.dp, table.cp, table.pp)
        table = replace(table, zero=np.where(stages == 0, 0, table.zero))
    table = _legal_of(job, table)
    return _one_of(random, table) if len(table) else None


def _legal_of(job: JobAndMachines, table: StrategyTable) -> StrategyTable:
    """The legal rows of a table."""
    parts = []
    for options, rows in table.rows_by_options():
        try:
            job.with_options(options)
        except MofaError:
            continue
        some = table.select_rows(rows)
        parts.append(some.select_rows(check_strategies(job, some).reason < 0))
    return StrategyTable.concatenated(parts)


def _one_of(random: np.random.Generator, table: StrategyTable) -> StrategyTable:
    """A row, field by field in random order, each uniform over the values that are left."""
    for name in random.permutation(COLUMNS):
        values = np.unique(column := getattr(table, name))
        table = table.select_rows(column == random.choice(values))
    return table.select_rows(np.array([0]))
