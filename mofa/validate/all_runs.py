"""``mofa validate``: all reference runs predicted and scored."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from mofa.calibrate.chunked_check import predict_measured_layers
from mofa.calibrate.shapes.chunked import FAMILY
from mofa.errors import SpecError
from mofa.search.one_plan import plan_with_replayed_time
from mofa.validate.attribute import Attribution, attribute_step, read_trace
from mofa.validate.bands import band_coverage
from mofa.validate.hopper import hopper_set_of_run
from mofa.validate.hosts import small_op_s_by_machine
from mofa.validate.published import published_reference_runs
from mofa.validate.reference import ReferenceRun, UnpredictedReferenceRun, measured_reference_runs
from mofa.validate.run_processes import RunProcesses
from mofa.validate.scale_series import scale_series
from mofa.validate.score import group_score, score_reference_runs
from mofa.validate.validation_report import (
    GroupScore,
    LayerComparison,
    RunScore,
    ValidationReport,
    compare_with_measured,
)

Group = Literal["measured", "measured-drawn", "measured-switches", "published"]
NEWEST_GPUS = ("h100", "h200")


def reference_dir(folder: Path | None = None) -> Path:
    """Folder of the reference runs: the given one, else that of the repository.

    Raises
    ------
    SpecError
        If there is none.
    """
    chosen = folder if folder is not None else Path(__file__).resolve().parents[2] / "reference_runs"
    if not chosen.is_dir():
        raise SpecError(f"{chosen}: no folder of reference runs; name one with --references, as in a clone of mofa")
    return chosen


def layer_measurement_folders(folder: Path) -> list[Path]:
    """The folders of measurements beside a folder of reference runs."""
    return sorted(path.parent for path in (folder.parent / "measurements").glob(f"*/{FAMILY}.csv"))


def reference_runs(
    folder: Path, scratch: Path, group: Group | None = None, spread: RunProcesses | None = None
) -> tuple[list[ReferenceRun], list[UnpredictedReferenceRun]]:
    """The reference runs of a folder with ``measured`` and ``published`` in it, and those that a rule leaves out."""
    usable: list[ReferenceRun] = []
    left_out: list[UnpredictedReferenceRun] = []
    if group in (None, "measured"):
        runs, out = measured_reference_runs(folder / "measured", scratch, spread=spread)
        usable, left_out = usable + runs, left_out + out
        if (folder / "exported").is_dir():
            runs, out = measured_reference_runs(folder / "exported", scratch, spread=spread)
            usable, left_out = usable + runs, left_out + out
    drawn = folder / "drawn" / "measured"
    if group in (None, "measured", "measured-drawn") and drawn.is_dir():
        runs, out = measured_reference_runs(drawn, scratch, spread=spread)
        usable, left_out = usable + runs, left_out + out
    switches = folder / "switches" / "measured"
    if group in (None, "measured", "measured-switches") and switches.is_dir():
        runs, out = measured_reference_runs(switches, scratch, spread=spread)
        usable, left_out = usable + runs, left_out + out
    if group in (None, "published"):
        runs, out = published_reference_runs(folder / "published")
        usable, left_out = usable + runs, left_out + out
    return usable, left_out


def validate_runs(
    folder: Path | None = None,
    *,
    group: Group | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ValidationReport:
    """Predict every reference run from its configuration and compare with what was measured.

    Parameters
    ----------
    folder
        With ``measured`` and ``published`` in it; the repository's by default.
    group
        Only one of the two, or of the measured ones those that were drawn at random.
    processes
        That predict runs beside each other; one a core by default. [-]
    progress
        Is told how many runs are predicted and how many there are.

    Returns
    -------
    ValidationReport
        Scores of runs and groups. Errors are ``predicted / measured - 1``.
    """
    started = time.monotonic()
    base = reference_dir(folder)
    with tempfile.TemporaryDirectory(prefix="mofa-") as scratch, RunProcesses(processes) as spread:
        usable, left_out = reference_runs(base, Path(scratch), group, spread)
        of_layers = spread.submit(compare_chunked_layers, base if group in (None, "measured") else None)
        profiled = _profiled(usable, base / "traces")
        attributed = spread.map(_family, list(profiled.values()))
        runs, not_scored = score_reference_runs(usable, left_out, spread=spread, progress=progress)
        families = dict(zip(profiled, attributed, strict=True))
        chunked = of_layers()
    return ValidationReport(
        groups=group_scores(runs),
        false_fits=sum(run.false_fit for run in runs),
        runs=tuple(runs),
        not_scored=tuple(not_scored),
        layers=chunked,
        families=families,
        bands=band_coverage(runs),
        scale=scale_series(usable, runs),
        elapsed_s=time.monotonic() - started,
    )


def compare_chunked_layers(folder: Path | None) -> tuple[LayerComparison, ...]:
    """Compare with predictions the MoE layers in token chunks of the measurements beside a folder of reference runs,
    none of no folder."""
    if folder is None:
        return ()
    chunked = []
    wanted = ("step", "peak_bytes", "reserved_bytes")
    for item in predict_measured_layers(
        layer_measurement_folders(folder), hosts=small_op_s_by_machine(folder), quantities=wanted
    ):
        of = {quantity: compare_with_measured(*pair) for quantity, pair in item.values.items()}
        step = of["step"]
        assert step is not None
        chunked.append(
            LayerComparison(
                shape=dict(item.shape), folder=item.folder, split=item.split, step_time=step,
                peak_allocated=of.get("peak_bytes"), peak_reserved=of.get("reserved_bytes"),
            )
        )  # fmt: skip
    return tuple(chunked)


def _profiled(references: Sequence[ReferenceRun], traces: Path) -> dict[str, tuple[ReferenceRun, Path]]:
    """The profiled runs, each with the trace of its first rank."""
    beside = {reference.id: (reference, traces / f"{reference.id}.0.json.gz") for reference in references}
    return {name: (reference, trace) for name, (reference, trace) in beside.items() if trace.is_file()}


def _family(of: tuple[ReferenceRun, Path]) -> Attribution:
    """A profile beside its prediction."""
    reference, trace = of
    workload, cluster, framework, strategy = reference.resolved_specs()
    plan = plan_with_replayed_time(workload, cluster, strategy, framework=framework)
    return attribute_step(read_trace(trace), plan, reference.rests_on)


def group_scores(runs: Sequence[RunScore]) -> dict[str, GroupScore]:
    """The groups in the order of their runs, then those that gather several."""
    groups: dict[str, list[RunScore]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    for name, belongs in GATHERED.items():
        gathered = [run for run in runs if belongs(run)]
        if gathered:
            groups[name] = gathered
    return {name: group_score(members) for name, members in groups.items()}


def _published(run: RunScore) -> bool:
    return run.group.startswith("published-")


def _complete(run: RunScore) -> bool:
    return _published(run) and run.has_whole_configuration


HALVES = ("measured-fitting", "measured-judging")
GATHERED: dict[str, Callable[[RunScore], bool]] = {
    "measured-skewed": lambda run: run.group in HALVES and run.skewed,
    "all-published": _published,
    "all-published-hopper-bf16": lambda run: (
        _complete(run) and run.gpu.lower().startswith(NEWEST_GPUS) and "fp8" not in run.framework
    ),
    "published-hopper-te-dense-bf16": lambda run: hopper_set_of_run(run) == "dense bf16",
    "published-hopper-te-dense-fp8": lambda run: hopper_set_of_run(run) == "dense fp8",
}
"""Groups over sources: our own runs with uneven routing, of both halves; all published runs; and of those the ones on
H100 and H200 in bf16 whose configuration is complete; and the dense rows on Hopper and Transformer Engine."""
