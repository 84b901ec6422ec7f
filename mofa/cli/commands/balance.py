"""``mofa balance``: token scheduling over expert replicas, before and after."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mofa.cli import options as opt
from mofa.cli.numbers import size_of_cluster_parser

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mofa.routing.balance.setup import BalanceSetup
    from mofa.search.experts.balance import BalanceReport, Progress
    from mofa.specs.routing import RoutingSpec

DEFAULT_ASSIGNMENTS, DEFAULT_MICRO_BATCHES = 65_536, 100


class SolverChoice(StrEnum):
    """Programs that schedule replicas."""

    auto = "auto"
    lp = "lp"
    flow = "flow"
    communication = "communication"


def balance(
    workload: Annotated[
        str | None, typer.Argument(help="A workload as in plan; without one, --experts says what is balanced.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Argument(help="A bundled node type or a node YAML, to cost the step before and after.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            parser=size_of_cluster_parser("64 or 1K"),
            help="GPUs: of the cluster; without one, of the merged group.",
        ),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help='With a cluster, such as "pp=4 ep=8 micro_batch=1".')
    ] = None,
    experts: Annotated[int | None, typer.Option("--experts", help="Experts, without a workload.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", help="Expert-parallel degree, without a cluster.")] = None,
    routing: opt.Routing = None,
    trace: opt.Trace = None,
    assignments: Annotated[
        int | None, typer.Option("--assignments", help="Token copies of a micro-batch; 65536 without a workload.")
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option("--micro-batches", help="How many to play; 100 without a workload, else 20, or all of a trace."),
    ] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="With a workload: other experts are popular in every micro-batch.")
    ] = False,
    placement: Annotated[
        Path | None,
        typer.Option(
            "--placement", metavar="FILE", help="Replicas, a CSV or Parquet file of expert and gpu, both from 0."
        ),
    ] = None,
    solver: Annotated[SolverChoice, typer.Option("--solver", help="Program that schedules.")] = SolverChoice.auto,
    capacity_factor: Annotated[
        float, typer.Option("--capacity-factor", help="Of the baseline that drops tokens.")
    ] = 1.0,
    interval: Annotated[int, typer.Option("--interval", help="Micro-batches between looks at the placement.")] = 10,
    threshold: Annotated[
        float, typer.Option("--threshold", help="Predicted max over mean above which experts move.")
    ] = 1.01,
    seed: Annotated[int | None, typer.Option("--seed", help="Of draws and placements; 0 by default.")] = None,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    framework: opt.Framework = None,
    set_: opt.Set = None,
    json: opt.Json = False,
    json_file: opt.JsonFile = None,
    csv: opt.Csv = None,
    out: opt.Out = None,
    quiet: opt.Quiet = False,
) -> None:
    """Schedule tokens over replicas of experts, micro-batch by micro-batch, beside plain expert parallelism.

    Two or more expert-parallel groups merge; a linear program says how many tokens each replica gets (MicroMoE).
    """
    from mofa.cli.output import OutputOptions
    from mofa.cli.progress import progress_bar
    from mofa.cli.routing import parse_routing
    from mofa.errors import SpecError
    from mofa.report.balance import print_balance, save_balance
    from mofa.routing.balance.place import PlacementAdaptationRule

    output = OutputOptions(json=json, json_file=json_file, csv=csv, out=out, quiet=quiet)
    output.refuse_unwritable_places("balance", [workload, cluster, trace, set_, placement, routing])
    if trace is not None and routing is not None:
        raise SpecError("--routing: is given beside --trace, which says how tokens fall; leave one out")
    rule = PlacementAdaptationRule(interval=interval, threshold=threshold)
    given = {"--seq-len": seq_len, "--global-batch": global_batch, "--framework": framework, "--set": set_,
             "--strategy": strategy}  # fmt: skip
    chosen = parse_routing(routing)
    options = {"solver": solver.value, "adaptation": rule, "capacity_factor": capacity_factor, "placement": placement}
    with progress_bar("layers", enabled=not quiet and not json) as progress:
        if workload is None:
            _refuse(given | {"--redraw": redraw or None}, "a workload")
            report, setup = _experts(
                experts, gpus, ep, chosen, trace, assignments, micro_batches, seed or 0, options, progress
            )
        else:
            _refuse({"--experts": experts, "--assignments": assignments}, "no workload")
            report, setup = _workload(
                workload, cluster, gpus, ep, strategy, chosen, trace, micro_batches, seed, options, progress,
                seq_len=seq_len, global_batch=global_batch, framework=framework, set_=set_, redraw=redraw,
            )  # fmt: skip
    output.show_result(
        report.model_dump_json(indent=2) + "\n", report.to_frame, lambda out: save_balance(report,
        setup.placement_of_replicas, out), lambda console: print_balance(report, console, quiet=quiet),
    )  # fmt: skip


def _refuse(given: Mapping[str, object], needs: str) -> None:
    from mofa.errors import SpecError

    for name, value in given.items():
        if value is not None:
            raise SpecError(f"{name}: is given, but needs {needs}; leave it out or change that")


def _experts(
    experts: int | None, gpus: int | None, ep: int | None, routing: RoutingSpec | None, trace: Path | None,
    assignments: int | None, micro_batches: int | None, seed: int, options: Mapping[str, object], progress: Progress,
) -> tuple[BalanceReport, BalanceSetup]:  # fmt: skip
    from mofa.errors import SpecError
    from mofa.search.experts.balance import balance_experts
    from mofa.specs.routing import RoutingSpec

    for name, value in {"--experts": experts, "--gpus": gpus, "--ep": ep}.items():
        if value is None:
            raise SpecError(f"{name}: is missing; without a workload write --experts 32 --gpus 8 --ep 4")
    assert experts is not None and gpus is not None and ep is not None
    if trace is not None:
        _refuse({"--assignments": assignments, "--micro-batches": micro_batches}, "no --trace, which has its own")
    setup = _setup(experts, gpus, ep, seed, options)
    chosen = (routing or RoutingSpec()).model_copy(update={"seed": seed})
    report = balance_experts(
        setup, chosen, assignments=DEFAULT_ASSIGNMENTS if assignments is None else assignments,
        micro_batches=DEFAULT_MICRO_BATCHES if micro_batches is None else micro_batches, trace=trace,
        progress=progress,
    )  # fmt: skip
    return report, setup


def _setup(
    experts: int, gpus: int, ep: int, seed: int, options: Mapping[str, object], gpus_per_node: int = 8
) -> BalanceSetup:  # fmt: skip
    from mofa.errors import SpecError
    from mofa.routing.balance.communication_lp import TransferCosts
    from mofa.routing.balance.setup import BalanceSetup
    from mofa.routing.placement_file import read_placement

    if seed < 0:
        raise SpecError(f"--seed: {seed} must be at least 0")
    weights = TransferCosts(gpus_per_node=gpus_per_node)
    file = options["placement"]
    chosen = {**options, "placement": None}
    setup = BalanceSetup(
        experts, gpus, ep, gpus_per_node=gpus_per_node, weights=weights, seed=seed, **chosen  # type: ignore[arg-type]
    )  # fmt: skip
    if file is None:
        return setup
    return replace(setup, placement=read_placement(str(file), experts, gpus, setup.experts_per_gpu))


def _workload(
    name: str, cluster: str | None, gpus: int | None, ep: int | None, strategy: str | None,
    routing: RoutingSpec | None, trace: Path | None, micro_batches: int | None, seed: int | None,
    options: Mapping[str, object], progress: Progress, *, seq_len: int | None, global_batch: str | None,
    framework: str | None, set_: list[str] | None, redraw: bool,
) -> tuple[BalanceReport, BalanceSetup]:  # fmt: skip
    from mofa.cli.jobs import read_cluster, read_framework, read_workload
    from mofa.cli.parse import parse_overrides
    from mofa.errors import SpecError
    from mofa.search.experts.balanced_step import (
        balance_report_of_workload,
        balance_report_with_step,
        scheduled_replica_setup,
        workload_with_trace_routing,
    )

    overrides = parse_overrides(set_)
    job = read_workload(name, overrides, seq_len=seq_len, global_batch=global_batch)
    if routing is not None:
        job = job.model_copy(update={"routing": routing})
    if trace is not None:
        job = workload_with_trace_routing(job, trace)
    if redraw and job.routing.kind == "counts":
        raise SpecError("--redraw: is given, but a trace says which experts are popular; leave it out")
    moe = job.model.moe
    if moe is None:
        raise SpecError(f"{name}: has no experts to balance; name a model that has")
    if gpus is None:
        raise SpecError("--gpus: is missing; say how many GPUs, such as --gpus 16")
    if seed is not None:
        if seed < 0:
            raise SpecError(f"--seed: {seed} must be at least 0")
        job = job.model_copy(update={"routing": job.routing.model_copy(update={"seed": seed})})
    drawn = job.routing.seed
    if cluster is None:
        _refuse({"--strategy": strategy, "--framework": framework}, "a cluster after the workload")
        if ep is None:
            raise SpecError("--ep: is missing; without a cluster write --gpus 16 --ep 8, the GPUs of the merged group")
        setup = _setup(moe.num_experts, gpus, ep, drawn, options)
        report = balance_report_of_workload(
            job, setup, tokens=job.batch.seq_len, micro_batches=micro_batches, redraw=redraw, progress=progress
        )
        return report, setup
    _refuse({"--ep": ep}, "no cluster: --strategy says ep")
    if strategy is None:
        raise SpecError('--strategy: is missing; write one, such as --strategy "pp=4 ep=8 micro_batch=1"')
    machines, facts = read_cluster(cluster, gpus, overrides), read_framework(framework, job, overrides)
    num_experts, group, degree = scheduled_replica_setup(job, machines, facts, strategy)
    setup = _setup(num_experts, group, degree, drawn, options, machines.node.gpus_per_node)
    report = balance_report_with_step(
        job, machines, strategy, setup, framework=facts, micro_batches=micro_batches, redraw=redraw,
        progress=progress,
    )  # fmt: skip
    return report, setup
