"""Options that several commands share, each said once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mofa.cli.numbers import checked_global_batch_text, size_of_cluster_parser, whole_number_parser
from mofa.specs.framework_names import FRAMEWORK_NAMES

MOST_SEARCH_S = 86_400.0
"""Of layouts: a day. [s]"""
MOST_RUN_S = 604_800
"""Of a measured run: a week. [s]"""
MOST_PROCESSES = 1024
"""Of one machine; more than any has cores. [-]"""


class FlopsConventionChoice(StrEnum):
    """Conventions of counting the FLOPs of causal attention."""

    causal = "causal"
    full = "full"


Workload = Annotated[
    str,
    typer.Argument(
        help="A bundled workload (mofa show models), a workload YAML, a Hugging Face config.json or its folder."
    ),
]
Cluster = Annotated[str, typer.Argument(help="A bundled node type (mofa show hardware) or a node YAML.")]
RunsOrWorkload = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD|RUN.yaml",
        help="A workload as in plan, a file of one or several runs, or the record of a measured run.",
    ),
]
MaybeCluster = Annotated[
    str | None, typer.Argument(help="A bundled node type or a node YAML; absent with a file of runs.")
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        metavar="N",
        parser=size_of_cluster_parser("64 or 1K"),
        help="Number of GPUs, such as 64 or 1K (1024).",
    ),
]
MaybeGpus = Gpus
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes", metavar="N", parser=size_of_cluster_parser("16"), help="Number of nodes, in place of --gpus."
    ),
]
FIX = "Only this value of a field of a strategy (mofa show strategy), or these, as tp=4,8. Repeatable."
WITH = (
    "fp8-delayed, fp8-tensorwise, fp8-blockwise, fp8-mxfp8, fp8-rowwise, fp8-rowwise-gw-hp, bf16_moments, bf16_grads, "
    "deepep, expert_overlap, micro_moe, token_chunks, moeblaze, cuda_graphs, early_stop, optimizer_offload, "
    "activation_offload"
)
WITHOUT = (
    "tp, sp, pp, vpp, cp, ep, etp, recompute, selective, full, zbv, tp_overlap, dispatcher, dp_replicate, "
    "overlap_param_gather, fewer_gpus"
)
Fix = Annotated[list[str] | None, typer.Option("--fix", metavar="NAME=N[,N]", help=FIX)]
Maximum = Annotated[
    list[str] | None,
    typer.Option("--max", metavar="NAME=N", help="At most this value of a degree, as pp=8. Repeatable."),
]
With = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="WORD", help=f"Also search what is not by default: {WITH}. Repeatable."),
]
Without = Annotated[
    list[str] | None, typer.Option("--without", metavar="WORD", help=f"Leave out one of {WITHOUT}. Repeatable.")
]
MemoryLimit = Annotated[
    str | None,
    typer.Option("--memory-limit", metavar="SIZE", help="Memory of a GPU for a plan and its margin, such as 70GB."),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        metavar="N",
        parser=whole_number_parser("8192 or 8K"),
        help="Sequence length in tokens, such as 8K.",
    ),
]
GlobalBatch = Annotated[
    str | None,
    typer.Option(
        "--global-batch",
        metavar="N",
        parser=checked_global_batch_text,
        help='Sequences per optimizer step, such as 1024, or "4M tokens".',
    ),
]
Tokens = Annotated[str | None, typer.Option("--tokens", help="Tokens to train on, such as 15T.")]
Framework = Annotated[
    str | None,
    typer.Option(
        "--framework", help=f"{', '.join(FRAMEWORK_NAMES)} (mofa show frameworks); else the workload's, else megatron."
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option("--strategy", help='Such as "tp=4 pp=4 micro_batch=1"; mofa show strategy lists all fields.'),
]
Routing = Annotated[
    str | None,
    typer.Option("--routing", help="balanced, zipf:S, dirichlet:ALPHA, lognormal:SIGMA or memfine-iteration-7."),
]
Trace = Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Counted tokens, a CSV or Parquet file.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Override one fact; PATH begins with workload., hardware., framework. or strategy. Repeatable.",
    ),
]
HostIssue = Annotated[
    str | None,
    typer.Option(
        "--host-issue",
        metavar="TIME",
        help="What a small op takes the host, such as 6.6us; else the profile's typical one, or a record's own.",
    ),
]
RankOrder = Annotated[
    str | None,
    typer.Option(
        "--rank-order",
        metavar="ORDER",
        help="How Megatron numbers ranks over the nodes, what varies fastest first: tp-cp-ep-dp-pp, or "
        "tp-cp-ep-pp-dp (--use-tp-pp-dp-mapping).",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="NAME|FILE", help="The host's profile, as `mofa calibrate host` writes it, in full."
    ),
]
Flops = Annotated[
    FlopsConventionChoice,
    typer.Option("--flops-convention", help="Whether TFLOP/s and MFU halve causal attention or count it in full."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
JsonFile = Annotated[Path | None, typer.Option("--json-file", metavar="FILE", help="Write the JSON to a file.")]
Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the table of plans to a file.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write figures and tables to a directory.")]
Replay = Annotated[
    bool, typer.Option("--replay/--no-replay", help="Play the result out op by op, or leave it at the closed forms.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        min=1,
        max=MOST_PROCESSES,
        help="Processes that play out; by default as many as cores may be used, up to 4.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar, and only the table of plans.")]
NoProgress = Annotated[bool, typer.Option("--quiet", help="Nothing on standard error but errors.")]
