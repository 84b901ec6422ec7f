"""What a strategy leaves out: the framework's defaults, and dp."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError, StrategyError
from mofa.schedules import default_schedule
from mofa.specs.files import shown_value
from mofa.specs.framework import FrameworkSpec
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.layouts.read import num_chunks_of_layout_text
from mofa.specs.overrides import strategy_from_fields
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
        Whose defaults: sequence parallelism wherever tp > 1; the ZeRO stage of its data parallelism
        (:func:`default_zero_stage`); etp is tp in Megatron-Core and, without ep, in torchtitan, else 1 there; context
        parallelism by ring in Megatron-Core, by all-gather in torchtitan; its recomputation. A layout's chunks say
        ``vpp``.
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
            f"{where}: strategy.framework ({shown_value(named)}) differs from {framework.name}; write it in one place"
        )
    given = strategy_from_fields(fields, f"{where}: strategy" if where != "strategy" else where)
    framework = framework.with_options(given.options)
    if "vpp" not in fields and given.layout:
        fields["vpp"] = max((num_chunks_of_layout_text(given.layout) or 1) // given.pp, 1)
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
    defaults = {
        "sp": given.tp > 1,
        "etp": given.tp if moe and (not framework.traits.has_pytorch_modules or given.ep == 1) else 1,
        "cp_kind": "allgather" if framework.traits.has_pytorch_modules else "ring",
        "zero": int(default_zero_stage(framework, dp, given.cp, given.pp)),
        "recompute": framework.default_recompute,
        "schedule": default_schedule(int(str(fields.get("vpp", given.vpp)))),
    }
    return spec_from_mapping(StrategySpec, {**defaults, **fields, "dp": dp, "framework": framework.name}, where)


def needs_sequence_parallel(framework: FrameworkSpec, *, moe: bool) -> bool:
    """Whether a framework runs tensor parallelism with sequence parallelism alone.

    torchtitan's plans of modules always split the sequence (``SequenceParallel`` of norms, 0.2.2,
    models/llama3/infra/parallelize.py). Megatron-Core 0.16.1 refuses experts in training without it
    (transformer/moe/moe_layer.py, ``MoELayer.forward``), and so does its overlap of tensor parallelism's communication
    (model_parallel_config.py). Other models run with it and without.

    Examples
    --------
    >>> from mofa.specs.load import load_framework
    >>> megatron = load_framework("megatron")
    >>> needs_sequence_parallel(megatron, moe=False), needs_sequence_parallel(megatron, moe=True)
    (False, True)
    """
    return moe or framework.tp_overlap or framework.traits.needs_sequence_parallel


def default_zero_stage(
    framework: FrameworkSpec, dp: NDArray[np.int64] | int, cp: NDArray[np.int64] | int, pp: NDArray[np.int64] | int
) -> NDArray[np.int64]:
    """The ZeRO stage of a framework's data parallelism.

    FSDP shards everything (3), but keeps weights gathered under pipelines (2); torchtitan does not wrap a model whose
    shard group is one rank (dp_shard * cp, distributed/parallel_dims.py, ``fsdp_enabled``): nothing is sharded (0).

    Examples
    --------
    >>> from mofa.specs.load import load_framework
    >>> default_zero_stage(load_framework("torchtitan"), np.array([8, 8, 1]), 1, np.array([1, 2, 1]))
    array([3, 2, 0])
    """
    dp, cp, pp = np.broadcast_arrays(dp, cp, pp)
    if framework.data_parallel not in ("fsdp", "hsdp"):
        return np.full(pp.shape, 0 if framework.data_parallel == "ddp" else 1)
    stage = np.where(pp > 1, 2, 3)
    if not framework.traits.leaves_lone_ranks_whole:
        return stage
    replicas = np.maximum(np.minimum(framework.dp_replicate, dp), 1)
    return np.where(dp // replicas * cp > 1, stage, 0)
