"""Published runs of one configuration on several numbers of GPUs: how efficiency falls with scale, and what is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mofa.validate.reference import ReferenceRun
from mofa.validate.validation_report import RunScore, ScalePoint, ScaleSeries


def scale_series(references: Sequence[ReferenceRun], runs: Sequence[RunScore]) -> tuple[ScaleSeries, ...]:
    """Series of published runs that differ in the number of GPUs alone.

    Either each GPU has the same sequences (weak scaling), or all together have (strong scaling). A run belongs to one
    series at most, to one of the first kind where it can.

    Parameters
    ----------
    references
        What was predicted.
    runs
        Their scores; those without a step are left out.

    Returns
    -------
    tuple
        In the order of their first runs, each with its smallest number of GPUs first.
    """
    scores = {run.id: run for run in runs if run.step_time is not None and run.group.startswith("published-")}
    left = [reference for reference in references if reference.id in scores]
    all_series: list[list[ReferenceRun]] = []
    for kind in ("weak", "strong"):
        of_key: dict[str, list[ReferenceRun]] = {}
        for reference in left:
            of_key.setdefault(_key(reference, kind), []).append(reference)
        series = [same for same in of_key.values() if len({reference.run.gpus for reference in same}) > 1]
        taken = {reference.id for same in series for reference in same}
        left = [reference for reference in left if reference.id not in taken]
        all_series += series
    order = {reference.id: i for i, reference in enumerate(references)}
    all_series.sort(key=lambda same: order[same[0].id])
    return tuple(_series(same, scores) for same in all_series)


def _key(reference: ReferenceRun, kind: str) -> str:
    """Equal for runs of one series."""
    run = reference.run.model_dump(exclude={"id", "gpus"})
    if isinstance(run["model"], dict):
        run["model"] = {key: value for key, value in run["model"].items() if key != "source"}
    sequences = run["batch"].pop("global_")
    run["sequences"] = sequences / reference.run.gpus if kind == "weak" else sequences
    return repr((kind, reference.group, run, reference.base_dir, reference.nvls))


def _series(references: Sequence[ReferenceRun], scores: Mapping[str, RunScore]) -> ScaleSeries:
    points = []
    for reference in sorted(references, key=lambda each: (each.run.gpus, each.id)):
        score = scores[reference.id]
        assert score.step_time is not None
        points.append(
            ScalePoint(
                id=score.id, num_gpus=score.num_gpus, sequences=reference.run.batch.global_, step_time=score.step_time
            )
        )
    first = scores[references[0].id]
    return ScaleSeries(
        group=first.group, model=first.model, gpu=first.gpu, strategy=first.strategy, points=tuple(points)
    )
