"""``mofa attribute``: a profiled step beside its prediction, per family of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mofa.cli import options as opt
from mofa.specs.shown_text import escape_file_text


def attribute(
    trace: Annotated[Path, typer.Argument(help="A torch.profiler trace of one step on one rank, .json or .json.gz.")],
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run, or the record of a measured one.")],
    json: opt.Json = False,
) -> None:
    """Put the kernels of a profiled step beside the prediction, per family.

    A record is predicted as it ran: on its own host, with the tokens that its routers sent.
    """
    import sys

    from mofa.cli.jobs import estimate_requests_from_options
    from mofa.errors import SpecError
    from mofa.report.attribution_text import print_attribution
    from mofa.report.tables import make_console
    from mofa.search.one_plan import plan_with_replayed_time
    from mofa.validate.attribute import attribute_step as put_beside
    from mofa.validate.attribute import read_profile, refuse_trace_of_another_run, trace_mismatches

    profile = read_profile(trace)
    with estimate_requests_from_options(str(run)) as jobs:
        if len(jobs) != 1:
            raise SpecError(f"{run}: holds {len(jobs)} runs; name a file of one")
        job = jobs[0]
        refuse_trace_of_another_run(trace, profile, job.cluster.num_gpus, job.id, job.gpu)
        plan = plan_with_replayed_time(job.workload, job.cluster, job.strategy, framework=job.framework)
    attribution = put_beside(profile.kernels, plan, job.rests_on)
    warnings = trace_mismatches(profile, attribution)
    attribution = attribution.model_copy(update={"warnings": tuple(warnings)})
    for warning in warnings:
        print(f"mofa: warning: {warning}", file=sys.stderr)
    if json:
        sys.stdout.write(escape_file_text(attribution.model_dump_json(indent=2) + "\n"))
    else:
        print_attribution(attribution, make_console())
