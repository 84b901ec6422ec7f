"""The table of scored runs that reports name their nearest runs from."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from io import StringIO

from mofa.specs.scored_runs import COLUMNS
from mofa.validate.validation_report import RunScore


def scored_runs_csv(runs: Iterable[RunScore]) -> str:
    """Runs whose step says something, a line each under :data:`mofa.specs.scored_runs.COLUMNS`.

    Those beside which a profiler ran, and those without a band, are left out.
    """
    out = StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        if run.step_time is None or run.band is None or run.ran_under_profiler:
            continue
        memory = run.peak_allocated
        writer.writerow({
            "id": run.id, "source": run.source_name, "model": run.model, "framework": run.framework_name,
            "gpu": run.gpu, "num_gpus": run.num_gpus, "strategy": run.strategy, "split": run.split,
            **run.band.circumstances.model_dump(), "measured_s": f"{run.step_time.measured:.5g}",
            "step_error": f"{run.step_time.error:.5f}",
            "memory_error": "" if memory is None else f"{memory.error:.5f}",
        })  # fmt: skip
    return out.getvalue()
