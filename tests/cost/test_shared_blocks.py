"""Strategies that choose other options and share blocks cost to the last bit what they cost without sharing any."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mofa.cost.block.routing_loads import BALANCED
from mofa.cost.estimate import TableEstimator
from mofa.cost.lower_bounds.steps import step_lower_bounds_s
from mofa.cost.option_sets import options_common_to_rows
from mofa.cost.shared_blocks import estimators_sharing_blocks
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.space import SOLVED, combinations_table, default_space, with_first_option_set
from mofa.specs.framework import FrameworkSpec
from mofa.specs.strategy import FrameworkOptions, StrategyTable
from tests.cost.test_rows_alone import GPUS, MODELS, UNEVEN
from tests.cost.toy import cluster, framework, workload


class Kind(NamedTuple):
    """A framework with options, the models that it is drawn with, and the sets of options that strategies choose."""

    framework: str
    models: tuple[str, ...]
    sets: tuple[FrameworkOptions, ...]
    options: dict[str, Any] = {}


REPLICAS = tuple(FrameworkOptions(dp_replicate=n) for n in (None, 2, 4, 8))
KINDS = {
    "replicas": Kind("torchtitan", ("dense", "moe", "mla-moe"), REPLICAS),
    "replicas compiled": Kind("torchtitan", ("dense", "windowed"), REPLICAS, {"compile": True}),
    "replicas one expert after the other": Kind("torchtitan", ("moe",), REPLICAS, {"experts": "sequential"}),
    "replicas and dispatchers": Kind(
        "torchtitan",
        ("moe", "mla-moe"),
        tuple(options._replace(dispatcher=name) for name in (None, "deepep") for options in REPLICAS),
    ),
    "replicas of fsdp1": Kind("fsdp1", ("dense",), REPLICAS),
    "gathers": Kind("megatron", ("dense", "moe"), (FrameworkOptions(), FrameworkOptions(overlap_param_gather=False))),
    "overlap": Kind("megatron", ("dense",), (FrameworkOptions(), FrameworkOptions(tp_overlap=True))),
    "dispatchers": Kind("megatron", ("moe",), (FrameworkOptions(), FrameworkOptions(dispatcher="allgather"))),
}


@cache
def legal(name: str, model: str) -> tuple[JobAndMachines, StrategyTable]:
    """The job of a kind and a model, and the legal strategies of all sets of options."""
    kind = KINDS[name]
    spec = MODELS[model]
    if kind.framework != "megatron":
        spec = spec.model_copy(update={"num_mtp_layers": 0})
    job = JobAndMachines(
        workload(spec, seq_len=4096, global_batch=32), cluster(GPUS), framework(kind.framework, **kind.options)
    )
    space = with_first_option_set(default_space(job.workload, job.cluster, job.framework))
    one = combinations_table(space, job.cluster, job.framework)
    tables = [
        replace(one, option_sets=kind.sets, options=np.full(len(one), number)) for number in range(len(kind.sets))
    ]
    table = StrategyTable.concatenated(tables)
    table = table.select_rows(table.recompute_layers != SOLVED)
    reasons = [check_strategies(job.with_options(kind.sets[n]), table.select_rows(table.options == n)).reason for n in
               range(len(kind.sets))]  # fmt: skip
    return job, table.select_rows(np.concatenate(reasons) < 0)


def costs(estimator: TableEstimator) -> dict[str, np.ndarray[Any, Any]]:
    """All that a search asks of an estimator."""
    rows, nothing_open = np.arange(len(estimator.table)), np.zeros(len(estimator.table), dtype=bool)
    exposed, hidden = estimator.exposed_and_hidden_seconds()
    memory = estimator.memory_of_rows(rows, estimator.table.recompute_layers)
    bounds = {
        f"bound at rest {at_rest}": step_lower_bounds_s(estimator, nothing_open, at_rest=at_rest)
        for at_rest in (False, True)
    }
    return {"exposed": exposed, "hidden": hidden, **vars(memory), **bounds}


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=2, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_shared_blocks_cost_the_same(name: str, data: st.DataObject) -> None:
    """Times, memory and bounds of random strategies of each set, some of them alone with their combination."""
    job, table = legal(name, data.draw(st.sampled_from(KINDS[name].models)))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    tables = []
    for number in sorted(
        data.draw(st.sets(st.sampled_from(np.unique(table.options).tolist()), min_size=2, max_size=3))
    ):
        of_set = np.flatnonzero(table.options == number)
        count = min(data.draw(st.integers(1, 8)), len(of_set))
        tables.append(table.select_rows(np.sort(random.choice(of_set, count, replace=False))))
    loads = UNEVEN if job.workload.model.moe and data.draw(st.booleans()) else BALANCED
    shared = estimators_sharing_blocks(job.workload, job.cluster, job.framework, tables, loads)
    for some, estimator in zip(tables, shared, strict=True):
        own = costs(TableEstimator(job.workload, job.cluster, job.framework, some, loads))
        for what, values in costs(estimator).items():
            assert np.array_equal(values, own[what]), (what, some.option_sets[int(some.options[0])])


def test_only_replicas_share_blocks() -> None:
    """A table whose rows differ in what blocks read is refused."""
    job, table = legal("dispatchers", "moe")
    assert isinstance(job.framework, FrameworkSpec)
    with pytest.raises(ValueError, match="rows_by_options"):
        options_common_to_rows(table)
    _, table = legal("replicas", "dense")
    assert options_common_to_rows(table) == FrameworkOptions()
