"""Choose recomputation and token chunks together, for each layer of each pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mofa.blocks.build import layer_kind
from mofa.cost.block.block_cost import base_recompute_mode
from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.estimate import TableEstimator
from mofa.cost.stages import split_layers
from mofa.errors import SpecError
from mofa.schedules import default_schedule
from mofa.search.layer_options import LayerOptions, choose_layer_options
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.base import Spec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.strategy import RecomputeSpec, StrategySpec, StrategyTable
from mofa.specs.workload import WorkloadSpec

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
GRID = 3
"""Number of loads at which options are costed; costs between them are interpolated linearly. [-]"""


class LayerRecomputeAndChunks(Spec):
    """Recomputation and token chunks of one layer."""

    layer: int = Field(ge=0, description="Index of the layer, from 0. [-]")
    stage: int = Field(ge=0, description="Pipeline stage. [-]")
    recompute: str = Field(description="Recomputation of the layer: full, or what the strategy says of the others.")
    token_chunks: int = Field(ge=1, description="Token chunks; 1 of a layer without experts. [-]")


class JointRecomputeAndChunks(Spec):
    """Recomputation and chunks of every layer, with the shortest step."""

    step_s: float = Field(gt=0, description="Step with the choice, in the model that was solved. [s]")
    bound_s: float = Field(gt=0, description="No choice of these options has a shorter step. [s]")
    optimal: bool = Field(description="Whether the bound was reached.")
    uniform_step_s: float | None = Field(description="Of the best single option for all layers; null if none fits. [s]")
    uniform: str | None = Field(description="That option.")
    model_error_bytes: float = Field(ge=0, description="How far the model of memory is off; added as margin. [B]")
    layers: tuple[LayerRecomputeAndChunks, ...]


@dataclass(frozen=True)
class _Costed:
    """Costs of the options at one load: seconds, kept and live bytes by kind of layer (O, kinds); steps (O, pp),
    (O,)."""

    seconds: FloatA
    kept_bytes: FloatA
    live: FloatA
    device_bytes: FloatA
    stage_s: FloatA
    step_s: FloatA


def choose_recompute_and_chunks(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, spec: StrategySpec, ratios: FloatA,
    bins: Sequence[int], limit_bytes: float,
) -> JointRecomputeAndChunks | None:  # fmt: skip
    """Choose recomputation and chunks for each layer, to shorten the step under the memory limit.

    Parameters
    ----------
    workload, cluster, framework, spec
        The job, the machines, the framework, and the strategy, under plain 1F1B.
    ratios
        Rows of the fullest rank over the mean, per iteration and layer with experts. (I, L) [-]
    bins
        Numbers of chunks. [-]
    limit_bytes
        Memory of a rank. [B]

    Returns
    -------
    JointRecomputeAndChunks | None
        None where no choice fits.

    Notes
    -----
    An option of a layer is a number of chunks, and recomputation: whole, or as the strategy says of other layers. A
    layer's memory is that at its largest load, its time that at its mean load. So the stage with the most uneven layers
    sets the pace.

    What a stage holds beside its layers comes from costing the strategy with one option for all layers. It is
    ``around`` at a layer's peak and ``outside_layers`` elsewhere, such as at the loss; each is the least over the
    options. The largest error of this, over the options, is added to both, stage by stage.

    CP-SAT solves it (:func:`mofa.search.layer_options.choose_layer_options`) and gives a bound; the paper sets chunks
    alone.
    """
    if spec.vpp > 1 or spec.schedule != default_schedule(1):
        raise SpecError(
            f"strategy: a joint choice needs schedule {default_schedule(1)}, not {spec.schedule} with vpp ({spec.vpp})"
        )
    base = base_recompute_mode(RecomputeSpec.parse(spec.recompute))
    modes = [mode.model_copy(update={"token_chunks": c}) for mode in (base, RecomputeSpec(kind="full")) for c in bins]
    row = checked_strategy_row(workload, cluster, framework, spec)
    table = replace(
        row.select_rows(np.zeros(len(modes), dtype=np.intp)), recompute=np.arange(len(modes)),
        recompute_layers=np.full(len(modes), -1), recompute_modes=tuple(modes),
    )  # fmt: skip
    grid = np.linspace(1.0, max(float(ratios.max()), 1.0 + 1e-6), GRID)
    costed = [_cost(workload, cluster, framework, table, modes, spec.ep, float(ratio)) for ratio in grid]
    splits = framework.splits_layers
    stages = split_layers(workload.model, spec.pp, 1, framework.name, splits=splits, layout=spec.layout)
    stage = stages.rank_of_each_layer
    kinds = [stages.kinds.index(layer_kind(workload.model, i)) for i in range(workload.model.num_layers)]
    m = max(workload.batch.global_batch // (spec.dp * spec.micro_batch), 1)
    flight = np.minimum(spec.pp - stage, m)
    worst, mean = np.ones(len(stage)), np.ones(len(stage))
    has_experts = [i for i in range(workload.model.num_layers) if workload.model.is_moe_layer(i)]
    worst[has_experts], mean[has_experts] = ratios.max(axis=0), ratios.mean(axis=0)

    def of_layers(name: str, load: FloatA) -> FloatA:
        curves = np.stack([getattr(c, name) for c in costed])
        return np.array(
            [[np.interp(load[i], grid, curves[:, o, kinds[i]]) for o in range(len(modes))] for i in range(len(stage))]
        )

    kept_bytes, live = of_layers("kept_bytes", worst) * flight[:, None], of_layers("live", worst)
    problem = LayerOptions(
        stage, of_layers("seconds", mean), kept_bytes, live, np.zeros(spec.pp), np.zeros(spec.pp), np.zeros(spec.pp),
        limit_bytes, m,
    )  # fmt: skip
    around, outside_layers, error = _rest(problem, costed[-1], kinds, flight)
    first = replace(problem, layer_s=costed[0].seconds.T[kinds])
    every = np.zeros(len(stage), dtype=np.int64)
    stage_s = np.maximum(costed[0].stage_s[0] - first.stage_seconds(every), 0.0)
    first = replace(first, stage_s=stage_s)
    beside_s = max(float(costed[0].step_s[0]) - first.step_s(every), 0.0)
    problem = replace(
        problem,
        stage_s=stage_s,
        stage_bytes_at_layer_peak=around + error,
        stage_bytes_outside_layers=outside_layers + error,
    )
    choice = choose_layer_options(problem)
    if choice is None:
        return None
    same = [np.full(len(stage), o) for o in range(len(modes))]
    fitting = [o for o in same if np.all(problem.stage_bytes(o) <= limit_bytes)]
    best = min(fitting, key=problem.step_s, default=None)
    return JointRecomputeAndChunks(
        step_s=choice.step_s + beside_s, bound_s=choice.bound_s + beside_s, optimal=choice.optimal,
        uniform_step_s=None if best is None else problem.step_s(best) + beside_s,
        uniform=None if best is None else str(modes[int(best[0])]), model_error_bytes=float(error.max()),
        layers=tuple(
            LayerRecomputeAndChunks(
                layer=i, stage=int(stage[i]), recompute=modes[o].text,
                token_chunks=modes[o].token_chunks if workload.model.is_moe_layer(i) else 1,
            )
            for i, o in enumerate(choice.option.tolist())
        ),
    )  # fmt: skip


def _cost(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, table: StrategyTable,
    modes: Sequence[RecomputeSpec], ep: int, ratio: float,
) -> _Costed:  # fmt: skip
    load = {ep: ratio}
    estimator = TableEstimator(workload, cluster, framework, table, RoutingLoads(load, load))
    blocks = [estimator.parts[0].costs.blocks[mode] for mode in modes]
    costed = estimator.breakdown(detail=True)
    assert costed.detail is not None

    def grid(pick: str) -> FloatA:
        out = np.zeros((len(blocks), len(blocks[0])))
        for o, row in enumerate(blocks):
            for k, block in enumerate(row):
                memory = block.memory
                value = {
                    "seconds": block.forward.total_s + block.backward.total_s,
                    "kept_bytes": memory.saved + memory.saved_slack,
                    "live": np.maximum(memory.backward_peak - memory.saved, memory.forward_peak),
                }[pick]
                out[o, k] = float(np.asarray(value).reshape(-1)[0])
        return out

    return _Costed(
        grid("seconds"),
        grid("kept_bytes"),
        grid("live"),
        costed.detail.device_bytes,
        costed.detail.time_s,
        costed.step_s,
    )


def _rest(problem: LayerOptions, costed: _Costed, kinds: list[int], flight: IntA) -> tuple[FloatA, FloatA, FloatA]:
    """Bytes of stages beside their layers, at a layer's peak and elsewhere, and the largest errors of these. [B]"""
    layers = replace(
        problem, kept_bytes=costed.kept_bytes.T[kinds] * flight[:, None], live_bytes=costed.live.T[kinds]
    )  # all layers at the load that was costed
    pp, options = len(problem.stage_s), len(costed.step_s)
    kept_bytes, live = np.zeros((options, pp)), np.zeros((options, pp))
    for o in range(options):
        kept_bytes[o] = np.bincount(layers.stage, layers.kept_bytes[:, o], pp)
        np.maximum.at(live[o], layers.stage, layers.live_bytes[:, o])
    around = (costed.device_bytes - kept_bytes - live).min(axis=0)
    outside_layers = (costed.device_bytes - kept_bytes).min(axis=0)
    modelled = kept_bytes + np.maximum(around + live, outside_layers)
    return around, outside_layers, np.maximum(costed.device_bytes - modelled, 0.0).max(axis=0)
