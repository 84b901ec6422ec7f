"""``mofa chunks``: token chunks per layer and iteration under uneven routing."""

from __future__ import annotations

from typing import Annotated

import typer

from mofa.cli import options as opt


def chunks(
    workload: opt.Workload,
    cluster: opt.Cluster,
    strategy: Annotated[str, typer.Option("--strategy", help='Such as "ep=32 micro_batch=1 recompute=full".')],
    gpus: opt.Gpus = None,
    nodes: opt.Nodes = None,
    routing: opt.Routing = None,
    trace: opt.Trace = None,
    bins: Annotated[str, typer.Option("--bins", help="Numbers of chunks to choose from.")] = "1,2,4,8",
    iterations: Annotated[
        int | None, typer.Option("--iterations", help="How many; all of a trace, else the routing's samples.")
    ] = None,
    window: Annotated[int, typer.Option("--window", help="Past iterations that the controller looks at.")] = 5,
    headroom: Annotated[float, typer.Option("--headroom", help="Over the largest load that it saw.")] = 1.25,
    joint: Annotated[
        bool, typer.Option("--joint", help="Choose recomputation and chunks of every layer together, too.")
    ] = False,
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
    """Choose in how many chunks tokens go through the experts, per layer and iteration (MemFine's MACT)."""
    from mofa.cli.jobs import read_cluster, read_framework, read_workload
    from mofa.cli.numbers import count_gpus
    from mofa.cli.output import OutputOptions
    from mofa.cli.parse import parse_overrides
    from mofa.cli.routing import workload_with_routing
    from mofa.errors import SpecError
    from mofa.report.chunks import print_chunks, save_chunks
    from mofa.search.experts.token_chunks import plan_token_chunks

    output = OutputOptions(json=json, json_file=json_file, csv=csv, out=out, quiet=quiet)
    output.refuse_unwritable_places("chunks", [workload, cluster, set_])
    overrides = parse_overrides(set_)
    if overrides["strategy"]:
        raise SpecError("--set strategy: is not read here; write it into --strategy")
    try:
        sizes = [int(word) for word in bins.replace(",", " ").split()]
    except ValueError:
        raise SpecError(f"--bins: {bins[:40]!r} are no whole numbers; write 1,2,4,8") from None
    job = read_workload(workload, overrides, seq_len=seq_len, global_batch=global_batch)
    job = workload_with_routing(job, routing, trace)
    machines, facts = (
        read_cluster(cluster, count_gpus(cluster, gpus, nodes), overrides),
        read_framework(framework, job, overrides),
    )
    report = plan_token_chunks(
        job, machines, strategy, framework=facts, bins=sizes, iterations=iterations, window=window, headroom=headroom,
        joint=joint,
    )  # fmt: skip
    output.show_result(
        report.model_dump_json(indent=2) + "\n", report.to_frame, lambda folder: save_chunks(report, folder),
        lambda console: print_chunks(report, console, quiet=quiet),
    )  # fmt: skip
