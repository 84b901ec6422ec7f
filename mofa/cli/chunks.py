"""``mofa chunks``: token chunks per layer and iteration under uneven routing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mofa.cli import options as opt


def chunks(
    workload: opt.Workload,
    cluster: opt.Cluster,
    gpus: opt.Gpus,
    strategy: Annotated[str, typer.Option("--strategy", help='Such as "ep=32 micro_batch=1 recompute=full".')],
    routing: Annotated[
        str | None,
        typer.Option("--routing", help="zipf:S, dirichlet:ALPHA, lognormal:SIGMA or memfine-iteration-7."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Counted tokens, a CSV or Parquet file.")
    ] = None,
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
    import sys

    import mofa
    from mofa.cli.output import Output
    from mofa.cli.parse import parse_overrides
    from mofa.cli.routing import read_routing
    from mofa.errors import SpecError
    from mofa.report.chunks import print_chunks, save_chunks
    from mofa.report.save import write_atomic, write_table
    from mofa.report.text import make_console
    from mofa.search.chunks import plan_chunks

    output = Output(json=json, json_file=json_file, csv=csv, out=out, quiet=quiet)
    output.check()
    overrides = parse_overrides(set_)
    if overrides["strategy"]:
        raise SpecError("--set strategy: is not read here; write it into --strategy")
    try:
        sizes = [int(word) for word in bins.replace(",", " ").split()]
    except ValueError:
        raise SpecError(f"--bins: {bins[:40]!r} are no whole numbers; write 1,2,4,8") from None
    job = mofa.load_workload(
        workload, seq_len=seq_len, global_batch=global_batch, overrides=overrides["workload"] or None
    )  # fmt: skip
    job = read_routing(job, routing, trace)
    machines = mofa.load_cluster(cluster, gpus, overrides=overrides["hardware"] or None)
    facts = mofa.load_framework(framework or job.framework or "megatron", overrides=overrides["framework"] or None)
    report = plan_chunks(
        job, machines, strategy, framework=facts, bins=sizes, iterations=iterations, window=window, headroom=headroom,
        joint=joint,
    )  # fmt: skip
    text = report.model_dump_json(indent=2) + "\n"
    if json_file is not None:
        write_atomic(json_file, text.encode())
    if csv is not None:
        write_table(csv, report.to_frame())
    if out is not None:
        files = save_chunks(report, out)
        if not quiet:
            print(f"wrote {len(files)} files to {out}", file=sys.stderr)
    if json:
        sys.stdout.write(text)
    else:
        print_chunks(report, make_console(), quiet=quiet)
