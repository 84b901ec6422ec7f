"""Series of published runs over numbers of GPUs: which belong together, and what is said of them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mofa.report.accuracy import print_validation, scaling_efficiency_rows
from mofa.report.accuracy_page import accuracy_page_figures
from mofa.validate.all_runs import reference_runs
from mofa.validate.reference import ReferenceRun
from mofa.validate.scale_series import scale_series
from mofa.validate.validation_report import ComparedQuantity, RunScore, ValidationReport

REFERENCES = Path(__file__).parents[2] / "reference_runs" / "published"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[ReferenceRun]:
    """MPT's runs on 8 to 512 GPUs."""
    folder = tmp_path_factory.mktemp("references")
    (folder / "published").mkdir()
    shutil.copy(REFERENCES / "foundry.yaml", folder / "published")
    shutil.copy(REFERENCES / "unusable.csv", folder / "published")
    return reference_runs(folder, folder, "published")[0]


def _score(reference: ReferenceRun, predicted: float = 1.0) -> RunScore:
    """A run that took a second."""
    return RunScore(
        id=reference.id, group=reference.group, model=reference.model, gpu="h100-sxm", num_gpus=reference.run.gpus,
        framework="fsdp1", strategy="dp", predicted_step_s=predicted, predicted_device_bytes=1.0, fits=True,
        out_of_memory=False, provenance={}, weak_fraction=0.0, exposed={}, played_out=True, source="a table",
        step_time=ComparedQuantity(measured=1.0, predicted=predicted, error=predicted - 1.0),
    )  # fmt: skip


def test_runs_that_differ_in_gpus_alone_hang_together(published: list[ReferenceRun]) -> None:
    series = scale_series(published, [_score(reference) for reference in published])
    by_id = {reference.id: reference for reference in published}
    told = [point.id for each in series for point in each.points]
    assert len(told) == len(set(told)) and len(series) >= 7
    for each in series:
        runs = [by_id[point.id].run for point in each.points]
        gpus = [run.gpus for run in runs]
        assert gpus == sorted(gpus) and len(set(gpus)) > 1
        assert len({(run.batch.seq_len, run.batch.micro, str(run.framework), str(run.strategy)) for run in runs}) == 1
        per_gpu = {run.batch.global_ / run.gpus for run in runs}
        assert len(per_gpu) == 1 or len({run.batch.global_ for run in runs}) == 1


def test_more_sequences_a_gpu_are_another_series(published: list[ReferenceRun]) -> None:
    first = next(reference for reference in published if reference.group == "published-foundry")

    def of(gpus: int, sequences: int, micro: int = 1) -> ReferenceRun:
        batch = first.run.batch.model_copy(update={"global_": sequences, "micro": micro})
        name = f"{gpus}-{sequences}-{micro}"
        return replace(first, id=name, run=first.run.model_copy(update={"id": name, "gpus": gpus, "batch": batch}))

    runs = [of(8, 64), of(16, 128), of(32, 128), of(64, 128), of(16, 128, micro=2)]
    series = scale_series(runs, [_score(reference) for reference in runs])
    assert [[point.id for point in each.points] for each in series] == [
        ["8-64-1", "16-128-1"],
        ["32-128-1", "64-128-1"],
    ]
    assert scale_series(runs, []) == ()


def test_efficiency_and_drift_are_told(published: list[ReferenceRun], capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    chosen = [reference for reference in published if reference.id in ("foundry-010", "foundry-012")]
    scores = [_score(reference, 0.9 if reference.run.gpus > 128 else 1.0) for reference in chosen]
    series = scale_series(chosen, scores)
    report = ValidationReport(groups={}, false_fits=0, runs=(), scale=series, elapsed_s=0.0)
    few, many = scaling_efficiency_rows(report)
    assert few[2:] == ["128", "100.0 %", "100.0 %", "+0.0 %", ""]
    assert many[2:] == ["512", "100.0 %", "111.1 %", "-10.0 %", "-10.0 points"]
    print_validation(report, Console(width=80), quiet=True)
    assert "-10.0 points" in capsys.readouterr().out
    (figure,) = accuracy_page_figures(report).values()
    assert figure.startswith(b"\x89PNG")
    assert accuracy_page_figures(report.model_copy(update={"scale": ()})) == {}
