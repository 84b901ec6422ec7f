"""``mofa serve``: the report in a browser of this machine, with sliders."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mofa.cli import long_run
from mofa.cli import options as opt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def serve(
    workload: opt.Workload,
    cluster: opt.Cluster,
    gpus: opt.MaybeGpus = None,
    nodes: opt.Nodes = None,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    tokens: opt.Tokens = None,
    framework: opt.Framework = None,
    fix: opt.Fix = None,
    maximum: opt.Maximum = None,
    with_: opt.With = None,
    without: opt.Without = None,
    memory_limit: opt.MemoryLimit = None,
    set_: long_run.Set = None,
    rank_order: opt.RankOrder = None,
    host_issue: opt.HostIssue = None,
    host: opt.Host = None,
    refine_seconds: Annotated[
        float,
        typer.Option(
            "--refine-seconds",
            min=0.0,
            max=opt.MOST_SEARCH_S,
            help="How long layouts are searched behind each answer; not by default.",
        ),
    ] = 0.0,
    jobs: opt.Jobs = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8421,
    address: Annotated[
        str, typer.Option("--address", metavar="ADDRESS", help="Of this machine alone: 127.0.0.1 or ::1.")
    ] = "127.0.0.1",
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser, where this machine has a screen.")
    ] = True,
    quiet: opt.NoProgress = False,
) -> None:
    """Open the report in a browser of this machine, and change GPUs, degrees or memory with sliders.

    Closed forms answer at once; behind them all strategies are searched and the best played out. --fix of one value
    says where a slider stands at first. Ctrl-C ends it.
    """
    from mofa.cli.jobs import read_cluster, read_framework, read_workload
    from mofa.cli.numbers import count_gpus
    from mofa.cli.parse import (
        parse_degree_limits,
        parse_fixed,
        parse_host_issue,
        parse_overrides,
        settings_with_rank_order,
        split_words,
    )
    from mofa.cli.report_page import given_settings
    from mofa.search.workers import usable_cores

    _refuse_without_server()
    from mofa.search.request import check_constraints
    from mofa.search.space import constrain_space, default_space
    from mofa.serve.address import listening_socket, loopback_address
    from mofa.serve.question import DEGREES, Question, SliderDegrees
    from mofa.serve.served_job import ServedJob
    from mofa.serve.server_process import run_server

    place = loopback_address(address)
    settings = settings_with_rank_order(set_, rank_order)
    overrides = parse_overrides(settings)
    fixed, bounds = parse_fixed(fix, overrides["strategy"]), parse_degree_limits(maximum)
    job = read_workload(workload, overrides, seq_len=seq_len, global_batch=global_batch, tokens=tokens)
    issue_s = parse_host_issue(host_issue, overrides, host)
    machines = read_cluster(cluster, count_gpus(cluster, gpus, nodes), overrides, issue_s, memory_limit)
    facts = read_framework(framework, job, overrides)
    words, words_out = split_words(with_), split_words(without)
    check_constraints(fixed, bounds, 1, "causal")
    constrain_space(
        default_space(job, machines, facts), fix=fixed, maximum=bounds, with_=words, without=words_out
    )  # refuses words and bounds that cannot be, before a browser asks
    chosen = {name: fixed.pop(name) for name in DEGREES if isinstance(fixed.get(name), int)}
    size = {"--seq-len": seq_len, "--global-batch": global_batch, "--tokens": tokens}
    served = ServedJob(
        workload=job,
        cluster=read_cluster(cluster, machines.num_gpus, overrides, issue_s),
        framework=facts,
        constraints={"fix": fixed, "maximum": bounds, "with_": words, "without": words_out},
        words=(workload, cluster, *_written(size)),
        options=_written({
            "--framework": framework, "--fix": _fixed_text(fixed), "--max": maximum, "--with": with_,
            "--without": without, "--set": set_, "--rank-order": rank_order, "--host-issue": host_issue, "--host": host,
        }),
        given=given_settings({"framework": framework}, settings or [], words),
        refine_seconds=refine_seconds,
        jobs=jobs or usable_cores(),
    )  # fmt: skip
    limit_gb = None if memory_limit is None else machines.gpu.capacity_bytes.value / 1e9
    start = Question(gpus=machines.num_gpus, memory_gb=limit_gb, degrees=SliderDegrees(**chosen))
    listening = listening_socket(place, port)
    with listening:
        run_server(served, start, listening, say=_speaker(quiet), open_browser=browser)


def _refuse_without_server() -> None:
    """Refuse where the packages of the extra are missing."""
    from importlib.util import find_spec

    from mofa.errors import SpecError

    missing = [name for name in ("flask", "waitress") if find_spec(name) is None]
    if missing:
        raise SpecError(f"mofa serve: {' and '.join(missing)} not installed; pip install 'mofa[serve]'")


def _speaker(quiet: bool) -> Any:
    def say(url: str) -> None:
        if not quiet:
            print(f"mofa serve: {url} on this machine; Ctrl-C ends it", file=sys.stderr, flush=True)

    return say


def _fixed_text(fixed: Mapping[str, object]) -> list[str]:
    """Fixed values without a slider, as ``--fix`` reads them.

    >>> _fixed_text({"recompute": "full", "tp": (2, 4), "sp": True})
    ['recompute=full', 'tp=2,4', 'sp=true']
    """
    return [
        f"{name}={','.join(map(_word, value)) if isinstance(value, tuple) else _word(value)}"
        for name, value in fixed.items()
    ]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _written(options: Mapping[str, object]) -> tuple[str, ...]:
    """Options as they were given; absent ones are left out.

    >>> _written({"--seq-len": 4096, "--with": ["deepep"], "--host": None})
    ('--seq-len', '4096', '--with', 'deepep')
    """
    out: list[str] = []
    for name, value in options.items():
        values: Iterable[object] = value if isinstance(value, list) else [] if value is None else [value]
        for each in values:
            out += [name, str(each)]
    return tuple(out)
