"""``mofa attribute``: a profiled step beside its prediction, per family of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mofa.cli import options as opt


def attribute(
    trace: Annotated[Path, typer.Argument(help="A torch.profiler trace of one step on one rank, .json or .json.gz.")],
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run, or the record of a measured one.")],
    json: opt.Json = False,
) -> None:
    """Put the kernels of a profiled step beside the prediction, per family."""
    import sys

    import mofa
    from mofa.report.accuracy import print_attribution
    from mofa.report.tables import make_console
    from mofa.validate.attribute import attribute as put_beside
    from mofa.validate.attribute import doubts, read_profile
    from mofa.validate.reference import identity_of_file, run_of_file

    profile = read_profile(trace)
    workload, cluster, framework, strategy = run_of_file(run)
    found = put_beside(profile.kernels, mofa.estimate(workload, cluster, strategy, framework=framework))
    warnings = doubts(profile, found, cluster.num_gpus, *identity_of_file(run))
    found = found.model_copy(update={"warnings": tuple(warnings)})
    for warning in warnings:
        print(f"mofa: warning: {warning}", file=sys.stderr)
    if json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    else:
        print_attribution(found, make_console())
