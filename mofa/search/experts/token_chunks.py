"""Token chunks of a strategy under a routing load: how many each layer needs per iteration, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mofa.cost.block.routing_loads import RoutingLoads
from mofa.cost.estimate import TableEstimator
from mofa.cost.stages import split_layers
from mofa.errors import SpecError
from mofa.routing.capacity import shares_under_capacity
from mofa.routing.chunks import BINS, check_chunk_bins, loads_expected_from_past
from mofa.routing.rank_load import expert_shares, max_rank_rows_over_mean
from mofa.routing.statistics import rank_loads_over_mean
from mofa.schedules import SCHEDULES
from mofa.search.experts.chunk_choice import JointRecomputeAndChunks, choose_recompute_and_chunks
from mofa.search.job_setup import with_numerics
from mofa.search.one_strategy import checked_strategy_row
from mofa.search.to_plan.builder import memory_limit_bytes
from mofa.specs.base import Spec
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import ClusterSpec
from mofa.specs.overrides import parse_strategy
from mofa.specs.strategy import StrategySpec
from mofa.specs.strategy_defaults import complete_strategy
from mofa.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    import pandas as pd

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
GRID = 4
"""Number of loads at which memory and time are costed; between them both are interpolated linearly. [-]"""


class ChunkPolicy(Spec):
    """One way to set the number of chunks."""

    name: str = Field(description="fixed c, mact (sees the iteration), or past (sees those before).")
    fits: bool = Field(description="Whether every layer fits in every iteration.")
    over: int = Field(ge=0, description="Layers and iterations that do not fit. [-]")
    peak_bytes: float = Field(gt=0, description="Device memory of the fullest rank, over all iterations. [B]")
    step_s: float = Field(gt=0, description="Step, averaged over the iterations. [s]")
    tokens_per_s_per_gpu: float = Field(gt=0, description="Throughput. [tokens/s]")
    mean_chunks: float = Field(gt=0, description="Chunks, averaged over layers and iterations. [-]")
    steps_s: tuple[float, ...] = Field(description="Step of each iteration. [s]")
    peaks_bytes: tuple[float, ...] = Field(description="Device memory of the fullest rank in each iteration. [B]")


class ChunkReport(Spec):
    """What ``mofa chunks --json`` prints."""

    schema_version: Literal["1.1"] = Field(default="1.1", description="Version of this contract.")
    workload: str = Field(description="Name of the job.")
    strategy: str = Field(description="The strategy.")
    routing: str = Field(description="How tokens fall on experts.")
    bins: tuple[int, ...] = Field(description="Numbers of chunks that may be chosen. [-]")
    limit_bytes: float = Field(gt=0, description="What a plan may fill of a GPU: the capacity less the margin. [B]")
    tokens_per_gpu: float = Field(gt=0, description="Of a step. [tokens]")
    max_rows: dict[str, tuple[float, ...]] = Field(
        description="Rows of a rank that fit, per number of chunks and stage; at most the most that occur. [rows]"
    )
    largest_rows: float = Field(gt=0, description="Most rows that a rank gets in any layer and iteration. [rows]")
    layers: tuple[int, ...] = Field(description="Layers with experts, from 0. [-]")
    chunks: tuple[tuple[int, ...], ...] = Field(
        description="mact's chunks per iteration and layer; 0 where no bin fits. [-]"
    )
    policies: tuple[ChunkPolicy, ...]
    joint: JointRecomputeAndChunks | None = Field(
        default=None, description="Null where it was not asked for, or nothing fits."
    )
    joint_asked: bool = Field(default=False, description="Whether a joint choice was asked for.")

    def to_frame(self) -> pd.DataFrame:
        """One row per iteration and layer: iteration, layer, chunks."""
        import pandas as pd

        rows = [
            {"iteration": i, "layer": layer, "chunks": c}
            for i, row in enumerate(self.chunks) for layer, c in zip(self.layers, row, strict=True)
        ]  # fmt: skip
        return pd.DataFrame(rows)


@dataclass(frozen=True)
class _Curves:
    """Costs of one number of chunks at the grid's loads: bytes and seconds of stages (GRID, pp), of steps (GRID,)."""

    grid: FloatA
    stage_bytes: FloatA
    stage_s: FloatA
    step_s: FloatA

    def bytes_of(self, ratios: FloatA, stage: IntA) -> FloatA:
        """Device memory with these loads on layers of these stages. (I, L), (L,) -> (I, L) [B]"""
        columns = [np.interp(ratios[:, i], self.grid, self.stage_bytes[:, s]) for i, s in enumerate(stage)]
        return np.stack(columns, axis=1)

    def seconds_of(self, ratios: FloatA, stage: IntA) -> FloatA:
        """A micro-batch of a layer's stage if all its layers had this load. (I, L), (L,) -> (I, L) [s]"""
        columns = [np.interp(ratios[:, i], self.grid, self.stage_s[:, s]) for i, s in enumerate(stage)]
        return np.stack(columns, axis=1)


@dataclass(frozen=True)
class _Pipeline:
    """How stages that differ make a step: ``even`` is a step whose stages take ``even_s``. [s], (pp,) [s]"""

    even: float
    even_s: FloatA
    micro_batches: int
    vpp: int

    def step_s(self, stage_s: FloatA) -> FloatA:
        """Steps of iterations whose stages take so long. (I, pp) -> (I,) [s]"""
        return np.asarray(self.even + self._schedule(stage_s) - self._schedule(self.even_s))

    def _schedule(self, stage_s: FloatA) -> FloatA:
        slowest = stage_s.max(axis=-1)
        return np.asarray(self.micro_batches * slowest + (stage_s.sum(axis=-1) - slowest) / self.vpp)


def plan_token_chunks(
    workload: WorkloadSpec, cluster: ClusterSpec, strategy: str, *, framework: FrameworkSpec,
    bins: Sequence[int] = BINS, iterations: int | None = None, window: int = 5, headroom: float = 1.25,
    joint: bool = False,
) -> ChunkReport:  # fmt: skip
    """Choose token chunks per layer and iteration of a routing load, and compare with fixed numbers.

    Parameters
    ----------
    workload, cluster, framework
        The job with its routing, the machines, the framework.
    strategy
        As ``mofa estimate --strategy`` takes it, without ``token_chunks``.
    bins
        Numbers of chunks that may be chosen.
    iterations
        How many; all of a trace, or enough for the routing's samples.
    window, headroom
        Of the controller that knows past iterations alone. It expects the largest load of the last ``window`` ones,
        times ``headroom``.
    joint
        Whether to choose recomputation and chunks of every layer together as well, once for the whole run.

    Notes
    -----
    For every bin, the strategy is costed at a few loads, from balanced to the largest that occurs. Memory of stages and
    time are interpolated linearly between these. A layer gets the smallest bin with which its stage fits (MACT), as if
    all layers of the stage had its load. Where no bin fits, the largest is costed.

    A stage's time is the sum over its layers, each with its own load and chunks. The slowest stage sets the pace; the
    others count once, while the pipeline fills: ``m max_r t_r + (sum_r t_r - max_r t_r) / v``. What the step with even
    loads takes beyond that is added. All micro-batches of an iteration have the iteration's load.

    References
    ----------
    MemFine, arXiv 2511.21431, section 4.2, and figure 5 for the chunks per layer and iteration.
    """
    bins = check_chunk_bins(bins)
    moe = workload.model.moe
    if moe is None:
        raise SpecError(f"{workload.name}: has no experts; name a model that has")
    if workload.routing.rank_capacity_factor is not None:
        raise SpecError(
            "routing.rank_capacity_factor: chunks are chosen for the rows that come, not padded ones; leave it out"
        )
    given = parse_strategy(strategy)
    if "token_chunks" in given:
        raise SpecError("--strategy: token_chunks is what is chosen here; leave it out")
    spec = complete_strategy(given, cluster.num_gpus, framework, moe=True)
    checked_strategy_row(workload, cluster, framework, spec)  # refuses what the framework cannot run
    shares = expert_shares(workload.routing, workload.model, iterations)
    if workload.routing.capacity_factor is not None:
        shares = shares_under_capacity(shares, workload.routing.capacity_factor, pad=workload.routing.pad_to_capacity)
    ratios = rank_loads_over_mean(shares, spec.ep).max(axis=-1)
    workload, cluster, framework = with_numerics(workload, cluster, framework, ())
    top = min(max(float(ratios.max()), 1.0 + 1e-6), max_rank_rows_over_mean(moe, spec.ep) + 1e-6)
    grid = np.linspace(1.0, top, GRID)
    curves = {c: _costed(workload, cluster, framework, spec, c, grid) for c in bins}
    stage = _stages_of(workload, framework, spec)
    limit = memory_limit_bytes(cluster, framework)
    chosen = _smallest(curves, ratios, stage, limit)
    expected = np.minimum(loads_expected_from_past(ratios, window, headroom), top)
    tokens = workload.batch.seq_len * workload.batch.global_batch / cluster.num_gpus

    first = curves[bins[0]]
    m = max(workload.batch.global_batch // (spec.dp * spec.micro_batch), 1)
    pipeline = _Pipeline(float(first.step_s[0]), first.stage_s[0], m, spec.vpp)

    def policy(name: str, chunks: IntA) -> ChunkPolicy:
        memory = np.zeros_like(ratios)
        seconds = np.zeros_like(ratios)
        for c, curve in curves.items():
            of_policy = chunks == c
            memory = np.where(of_policy, curve.bytes_of(ratios, stage), memory)
            seconds = np.where(of_policy, curve.seconds_of(ratios, stage), seconds)
        over = int((memory > limit).sum())
        steps_s = pipeline.step_s(_of_stages(seconds, stage, first.stage_s[0]))
        step_s = float(steps_s.mean())
        return ChunkPolicy(
            name=name, fits=over == 0, over=over, peak_bytes=float(memory.max()), step_s=step_s,
            tokens_per_s_per_gpu=tokens / step_s, mean_chunks=float(chunks.mean()), steps_s=tuple(steps_s.tolist()),
            peaks_bytes=tuple(memory.max(axis=1).tolist()),
        )  # fmt: skip

    policies = [policy(f"fixed {c}", np.full(ratios.shape, c)) for c in bins]
    policies.append(policy("mact", np.where(chosen > 0, chosen, bins[-1])))
    smallest_fitting = _smallest(curves, expected, stage, limit)
    policies.append(policy("past", np.where(smallest_fitting > 0, smallest_fitting, bins[-1])))
    mean_rows = spec.micro_batch * workload.batch.seq_len * moe.top_k / spec.cp
    mean_rows /= spec.tp if spec.sp else 1
    return ChunkReport(
        workload=workload.name, strategy=strategy, routing=str(workload.routing), bins=bins, limit_bytes=limit,
        tokens_per_gpu=tokens, max_rows={str(c): tuple(_most(curve, limit) * mean_rows) for c, curve in curves.items()},
        layers=tuple(i for i in range(workload.model.num_layers) if workload.model.is_moe_layer(i)),
        chunks=tuple(tuple(int(c) for c in row) for row in chosen), policies=tuple(policies),
        joint=choose_recompute_and_chunks(workload, cluster, framework, spec, ratios, bins, limit) if joint else None,
        joint_asked=joint, largest_rows=float(ratios.max()) * mean_rows,
    )  # fmt: skip


def _costed(
    workload: WorkloadSpec, cluster: ClusterSpec, framework: FrameworkSpec, spec: StrategySpec, chunks: int,
    grid: FloatA,
) -> _Curves:  # fmt: skip
    row = checked_strategy_row(workload, cluster, framework, spec.model_copy(update={"token_chunks": chunks}))
    memory, stages, seconds = [], [], []
    for ratio in grid:
        load = {spec.ep: float(ratio)}
        costed = TableEstimator(workload, cluster, framework, row, RoutingLoads(load, load)).breakdown(detail=True)
        assert costed.detail is not None
        memory.append(costed.detail.device_bytes[0])
        stages.append(costed.detail.time_s[0])
        seconds.append(float(costed.step_s[0]))
    return _Curves(grid, np.array(memory), np.array(stages), np.array(seconds))


def _of_stages(seconds: FloatA, stage: IntA, without: FloatA) -> FloatA:
    """Time of each stage: the mean, over its layers, of the stage's time if all its layers were like that one.

    A stage without layers of experts takes ``without``. (I, L), (L,), (pp,) -> (I, pp) [s]
    """
    columns = [seconds[:, stage == r].mean(axis=1) if (stage == r).any() else np.full(len(seconds), t)
               for r, t in enumerate(without)]  # fmt: skip
    return np.stack(columns, axis=1)


def _stages_of(workload: WorkloadSpec, framework: FrameworkSpec, spec: StrategySpec) -> IntA:
    """The pipeline stage of every layer with experts. (L,)"""
    stages = split_layers(
        workload.model, spec.pp, spec.vpp, framework.name, SCHEDULES[spec.schedule].placement,
        framework.splits_layers, spec.layout,
    )  # fmt: skip
    has_experts = [i for i in range(workload.model.num_layers) if workload.model.is_moe_layer(i)]
    return stages.rank_of_each_layer[has_experts]


def _smallest(curves: dict[int, _Curves], ratios: FloatA, stage: IntA, limit: float) -> IntA:
    """The smallest number of chunks with which each layer's stage fits; 0 where none does. (I, L)"""
    chosen = np.zeros(ratios.shape, dtype=np.int64)
    for c in sorted(curves, reverse=True):
        chosen = np.where(curves[c].bytes_of(ratios, stage) <= limit, c, chosen)
    return chosen


def _most(curve: _Curves, limit: float) -> FloatA:
    """The largest load over the mean up to which each stage fits, at most the grid's last; 0 where none does. (pp,)

    Reserved memory may fall with more rows, as blocks are reused. So a load that fits above one that does not is no
    bound.
    """
    fine = np.linspace(curve.grid[0], curve.grid[-1], 2001)
    most = []
    for column in curve.stage_bytes.T:
        fits = np.logical_and.accumulate(np.interp(fine, curve.grid, column) <= limit)
        most.append(float(fine[fits][-1]) if fits[0] else 0.0)
    return np.array(most)
