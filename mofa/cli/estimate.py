"""``mofa estimate``: one strategy, costed and explained, or the runs of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mofa.cli import options as opt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mofa.search.result import Estimate, FlopsConvention
    from mofa.specs.framework import FrameworkSpec
    from mofa.specs.hardware import ClusterSpec
    from mofa.specs.run import RunSpec
    from mofa.specs.strategy import StrategySpec
    from mofa.specs.workload import WorkloadSpec


def estimate(
    workload: Annotated[
        str,
        typer.Argument(metavar="WORKLOAD|RUN.yaml", help="A workload as in plan, or a file of one or several runs."),
    ],
    cluster: Annotated[
        str | None, typer.Argument(help="A bundled node type or a node YAML; absent with a file of runs.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Number of GPUs.")] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help='Such as "tp=4 pp=4 micro_batch=1 recompute=selective".')
    ] = None,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    tokens: opt.Tokens = None,
    framework: opt.Framework = None,
    set_: opt.Set = None,
    flops_convention: opt.Flops = opt.FlopsChoice.causal,
    json: opt.Json = False,
    json_file: opt.JsonFile = None,
    csv: opt.Csv = None,
    out: opt.Out = None,
    quiet: opt.Quiet = False,
) -> None:
    """Cost one strategy and say where its time and memory go, whether it fits or not."""
    import mofa
    from mofa.cli.output import Output
    from mofa.cli.parse import parse_overrides
    from mofa.errors import SpecError

    output = Output(json=json, json_file=json_file, csv=csv, out=out, quiet=quiet)
    output.check()
    overrides = parse_overrides(set_)
    convention: FlopsConvention = "full" if flops_convention is opt.FlopsChoice.full else "causal"
    if cluster is None:
        given = {"--gpus": gpus, "--strategy": strategy, "--seq-len": seq_len, "--global-batch": global_batch,
                 "--tokens": tokens, "--framework": framework}  # fmt: skip
        _refuse_beside_a_file(workload, [name for name, value in given.items() if value is not None])
        estimates = _estimate_runs(workload, overrides, convention)
    else:
        if gpus is None:
            raise SpecError("--gpus: is missing; say how many GPUs, such as --gpus 64")
        if strategy is None and not overrides["strategy"]:
            raise SpecError('--strategy: is missing; write one, such as --strategy "tp=4 pp=4 micro_batch=1"')
        job = mofa.load_workload(
            workload, seq_len=seq_len, global_batch=global_batch, tokens=tokens, overrides=overrides["workload"] or None
        )
        machines = mofa.load_cluster(cluster, gpus, overrides=overrides["hardware"] or None)
        facts = mofa.load_framework(framework or job.framework or "megatron", overrides=overrides["framework"] or None)
        wanted = {**_read_strategy(strategy), **overrides["strategy"]}
        estimates = [_estimate(None, job, machines, wanted, facts, convention)]
    output.show_estimates(estimates)


def _refuse_beside_a_file(file: str, given: list[str]) -> None:
    from mofa.errors import SpecError

    if given:
        raise SpecError(
            f"{file}: read as a file of runs, because no cluster is named, but {given[0]} is given; "
            "name a cluster after the workload, or leave the option out"
        )


def _read_strategy(text: str | None) -> dict[str, object]:
    from mofa.specs.overrides import parse_strategy

    return {} if text is None else parse_strategy(text)


def _estimate_runs(
    file: str, overrides: Mapping[str, Mapping[str, object]], convention: FlopsConvention
) -> list[Estimate]:
    from mofa.specs.load import load_runs

    estimates = []
    for run in load_runs(file):
        workload, cluster, framework, strategy = _resolve(run, Path(file).parent, overrides)
        estimates.append(_estimate(run.id, workload, cluster, strategy, framework, convention))
    return estimates


def _resolve(
    run: RunSpec, folder: Path, overrides: Mapping[str, Mapping[str, object]]
) -> tuple[WorkloadSpec, ClusterSpec, FrameworkSpec, StrategySpec]:
    """What a run names, with the changes of ``--set``."""
    from mofa.specs.load import build, bundled, load_cluster, resolve_run
    from mofa.specs.overrides import override
    from mofa.specs.workload import WorkloadSpec

    strategy = overrides["strategy"]
    micro_batch = strategy.get("micro_batch", run.batch.micro)
    changed = run.model_copy(
        update={
            "framework": override(run.framework, overrides["framework"], "--set"),
            "strategy": {**run.strategy, **strategy},
            "batch": run.batch.model_copy(update={"micro": micro_batch}),
        }
    )
    workload, cluster, framework, complete = resolve_run(changed, folder)
    if overrides["workload"]:
        raw = override(workload.model_dump(exclude_none=True), overrides["workload"], "--set workload")
        workload = build(WorkloadSpec, raw, "--set workload")
    if overrides["hardware"]:
        beside = folder / run.hardware
        place = beside if run.hardware not in bundled("nodes") and beside.exists() else run.hardware
        cluster = load_cluster(place, run.gpus, overrides["hardware"])
    return workload, cluster, framework, complete


def _estimate(
    run_id: str | None,
    workload: WorkloadSpec,
    cluster: ClusterSpec,
    strategy: StrategySpec | Mapping[str, object],
    framework: FrameworkSpec,
    convention: FlopsConvention,
) -> Estimate:
    """Cost one strategy and say what it is for."""
    import mofa
    from mofa.search.result import ClusterSummary, Estimate, FrameworkSummary, Plan, WorkloadSummary

    plan = mofa.estimate(workload, cluster, strategy, framework=framework, flops_convention=convention)
    return Estimate(
        **{name: getattr(plan, name) for name in Plan.model_fields},
        id=run_id,
        workload=WorkloadSummary.of(workload),
        cluster=ClusterSummary.of(cluster),
        framework=FrameworkSummary.of(framework),
    )
