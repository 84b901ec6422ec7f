"""What a strategy leaves out: the framework's defaults, and dp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mofa.errors import SpecError, StrategyError
from mofa.specs.build import build
from mofa.specs.files import short
from mofa.specs.framework import PYTORCH_MODULES, FrameworkSpec
from mofa.specs.overrides import check_strategy
from mofa.specs.strategy import StrategySpec


def complete_strategy(
    raw: Mapping[str, object],
    num_gpus: int,
    framework: FrameworkSpec,
    *,
    moe: bool = False,
    where: str = "strategy",
) -> StrategySpec:
    """A strategy with the framework's defaults for what it leaves out, and its dp.

    Parameters
    ----------
    raw
        Fields by name; ``recompute`` as text.
    num_gpus
        GPUs of the job; dp = num_gpus / (tp * cp * pp). [-]
    framework
        Whose defaults: sequence parallelism wherever tp > 1; the ZeRO stage of its data parallelism (FSDP keeps
        weights gathered under pp: 2, else 3); etp is tp in Megatron-Core and, without ep, in torchtitan, else 1 there;
        context parallelism by ring in Megatron-Core, by all-gather in torchtitan; its recomputation.
    moe
        Whether the model has experts; a dense one has etp 1.
    where
        Begins error messages.

    Examples
    --------
    >>> from mofa.specs.load import load_framework
    >>> complete_strategy({"tp": 4, "pp": 4, "vpp": 5}, 64, load_framework("megatron")).dp
    4
    """
    fields = {key: value for key, value in raw.items() if key != "framework"}
    named = raw.get("framework")
    if named is not None and named != framework.name:
        raise SpecError(
            f"{where}: strategy.framework ({short(named)}) differs from {framework.name}; write it in one place"
        )
    check_strategy(fields, f"{where}: strategy" if where != "strategy" else where)
    given = StrategySpec(**cast("dict[str, Any]", fields))
    replica = given.tp * given.cp * given.pp
    if num_gpus % replica:
        raise StrategyError(
            f"{where}: gpus ({num_gpus}) must be a multiple of tp ({given.tp}) x cp ({given.cp}) x pp ({given.pp}) = "
            f"{replica}; change one of them"
        )
    dp = num_gpus // replica
    if "dp" in fields and given.dp != dp:
        raise StrategyError(
            f"{where}: dp ({given.dp}) must be gpus ({num_gpus}) / (tp x cp x pp = {replica}) = {dp}; leave it out"
        )
    fsdp_stage = 2 if given.pp > 1 else 3
    stages = {"distributed-optimizer": 1, "ddp": 0, "fsdp": fsdp_stage, "hsdp": fsdp_stage}
    defaults = {
        "sp": given.tp > 1,
        "etp": given.tp if moe and (framework.name not in PYTORCH_MODULES or given.ep == 1) else 1,
        "cp_kind": "allgather" if framework.name in PYTORCH_MODULES else "ring",
        "zero": stages[framework.data_parallel],
        "recompute": framework.default_recompute,
        "schedule": "interleaved" if given.vpp > 1 else "1f1b",
    }
    return build(StrategySpec, {**defaults, **fields, "dp": dp, "framework": framework.name}, where)
