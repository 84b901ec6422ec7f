"""One strategy as a table of one row, checked as the search checks its rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mofa.errors import SpecError, StrategyError
from mofa.schedules import SCHEDULE_NAMES
from mofa.search.legality.masks import CHECKS, JobAndMachines, check_strategies
from mofa.search.legality.named_check import refuse_idle_dispatcher
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.overrides import parse_strategy
from mofa.specs.strategy import BALANCING, CP_KINDS, RecomputeSpec, StrategySpec, StrategyTable
from mofa.specs.strategy_defaults import complete_strategy, default_zero_stage
from mofa.specs.workload import WorkloadSpec


def checked_strategy_row(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, strategy: object
) -> StrategyTable:
    """A strategy as a checked table of one row.

    Raises
    ------
    StrategyError
        If a check rejects it; the message names values and what to do.
    SpecError
        If it is no strategy.
    """
    if isinstance(strategy, str):
        strategy = parse_strategy(strategy)
    if isinstance(strategy, Mapping):
        strategy = complete_strategy(strategy, cluster.num_gpus, framework, moe=workload.model.moe is not None)
    if not isinstance(strategy, StrategySpec):
        raise SpecError(f"strategy: {type(strategy).__name__} is no strategy; give text, a mapping or a StrategySpec")
    spec = strategy
    if spec.framework != framework.name:
        raise StrategyError(
            f"strategy: framework ({spec.framework}) differs from {framework.name}; give the framework once"
        )
    refuse_idle_dispatcher(workload.model, spec.dispatcher)
    framework = framework.with_options(spec.options)
    mode = RecomputeSpec.parse(spec.recompute).model_copy(update={"token_chunks": spec.token_chunks})
    layers = -1
    if mode.kind == "full" and mode.layers is not None:
        layers, mode = mode.layers, mode.model_copy(update={"layers": None})
        if framework.traits.has_pytorch_modules:
            raise StrategyError(
                f"strategy: recompute ({spec.recompute}): full:n is Megatron's; use full, every layer's"
            )

    def column(value: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([value], dtype=np.int64)

    zero = spec.zero
    shards = framework.traits.leaves_lone_ranks_whole and framework.data_parallel != "ddp"
    if shards and zero >= 2 and default_zero_stage(framework, spec.dp, spec.cp, spec.pp) == 0:
        zero = 0  # asked for, but there is nothing to shard over
    # torchtitan never sets its rotate method in training
    kind = "allgather" if spec.cp_kind == "ring" and framework.traits.gathers_for_ring else spec.cp_kind
    row = StrategyTable(
        tp=column(spec.tp), sp=np.array([spec.sp and spec.tp > 1]), pp=column(spec.pp), vpp=column(spec.vpp),
        cp=column(spec.cp), cp_kind=column(CP_KINDS.index(kind)), ep=column(spec.ep),
        etp=column(spec.etp), dp=column(spec.dp), micro_batch=column(spec.micro_batch), zero=column(zero),
        recompute=column(0), recompute_layers=column(layers), schedule=column(SCHEDULE_NAMES.index(spec.schedule)),
        balancing=column(BALANCING.index(spec.balancing)), layout=column(0), options=column(0),
        recompute_modes=(mode,), layouts=(spec.layout,), option_sets=(spec.options,),
    )  # fmt: skip
    job = JobAndMachines(workload, cluster, framework)
    verdict = check_strategies(job, row)
    if verdict.reason[0] >= 0:
        raise StrategyError(f"strategy: {CHECKS[int(verdict.reason[0])].message(job, row)}")
    if spec.dp * spec.tp * spec.cp * spec.pp != cluster.num_gpus:
        raise StrategyError(
            f"strategy: tp x cp x pp x dp ({spec.dp * spec.tp * spec.cp * spec.pp}) must be gpus ({cluster.num_gpus})"
        )
    return row
