"""Runs and MoE layers predicted before anyone measured them, and how far off that was.

python scripts/blind.py predict reference_runs/blind.csv reference_runs/plans/{eighth,ninth}.yaml
python scripts/blind.py predict reference_runs/blind_second.csv reference_runs/plans/tenth.yaml
python scripts/blind.py predict reference_runs/blind_third.csv reference_runs/plans/fifth.yaml
python scripts/blind.py predict reference_runs/blind_fourth.csv reference_runs/plans/eleventh.yaml
python scripts/blind.py predict reference_runs/blind_h100.csv reference_runs/plans/h100.yaml
python scripts/blind.py predict reference_runs/blind_fifth.csv reference_runs/plans/thirteenth.yaml
python scripts/blind.py predict reference_runs/blind_sixth.csv reference_runs/plans/fourteenth.yaml
python scripts/blind.py predict reference_runs/blind_seventh.csv reference_runs/plans/sixteenth.yaml
python scripts/blind.py predict reference_runs/blind_eighth.csv reference_runs/plans/seventeenth.yaml
python scripts/blind.py predict reference_runs/blind_h100_second.csv reference_runs/plans/h100-second.yaml
python scripts/blind.py predict reference_runs/blind_ninth.csv reference_runs/plans/eighteenth.yaml
python scripts/blind.py predict reference_runs/blind_tenth.csv reference_runs/plans/nineteenth.yaml
python scripts/blind.py predict reference_runs/blind_h100_third.csv reference_runs/plans/h100-third.yaml
python scripts/blind.py predict reference_runs/blind_h100_host.csv reference_runs/plans/h100-host.yaml
python scripts/blind.py predict reference_runs/blind_te.csv reference_runs/plans/te-{1gpu,2gpu}.yaml
python scripts/blind.py predict reference_runs/blind_te_near.csv reference_runs/plans/te-near.yaml
python scripts/blind.py predict reference_runs/blind_te_traced.csv reference_runs/plans/te-traced.yaml
python scripts/blind.py predict reference_runs/blind_te_four.csv reference_runs/plans/te-4gpu.yaml
python scripts/blind.py predict reference_runs/blind_te_traced_second.csv reference_runs/plans/te-traced-second.yaml
python scripts/blind.py predict reference_runs/blind_te_four_second.csv reference_runs/plans/te-4gpu-second.yaml
python scripts/blind.py predict reference_runs/blind_te_pp_fp8.csv reference_runs/plans/te-pp-fp8.yaml
python scripts/blind.py predict reference_runs/blind_te_layers.csv reference_runs/plans/te-layers.yaml
python scripts/blind.py predict reference_runs/blind_te_graphs.csv reference_runs/plans/te-graphs.yaml
python scripts/blind.py predict reference_runs/blind_te_graphs_second.csv reference_runs/plans/te-graphs.yaml  # judging
python scripts/blind.py predict reference_runs/blind_te_experts.csv reference_runs/plans/te-experts.yaml
python scripts/blind.py predict reference_runs/blind_te_experts_fp8.csv reference_runs/plans/te-experts-fp8.yaml
python scripts/blind.py predict reference_runs/blind_te_kernels.csv reference_runs/plans/te-kernels.yaml
python scripts/blind.py predict reference_runs/blind_te_offload.csv reference_runs/plans/activation-offload.yaml
python scripts/blind.py predict reference_runs/blind_te_two.csv reference_runs/plans/te-2gpu-h200.yaml
python scripts/blind.py predict reference_runs/blind_te_overlap.csv reference_runs/plans/te-expert-overlap.yaml
python scripts/blind.py predict reference_runs/blind_te_short.csv reference_runs/plans/te-short-traced.yaml
python scripts/blind.py predict reference_runs/blind_drawn.csv reference_runs/plans/drawn.yaml
python scripts/blind.py predict reference_runs/blind_drawn_h100.csv reference_runs/plans/drawn-h100.yaml
python scripts/blind.py predict reference_runs/blind_drawn_h200.csv reference_runs/plans/drawn-h200-{1,2}gpu.yaml
python scripts/blind.py predict reference_runs/blind_drawn_third.csv reference_runs/plans/drawn-third-{1,2}gpu.yaml
python scripts/blind.py predict reference_runs/blind_drawn_fourth.csv reference_runs/plans/drawn-fourth-{1,2}gpu.yaml
python scripts/blind.py predict reference_runs/blind_drawn_fifth.csv reference_runs/plans/drawn-fifth-1gpu.yaml
python scripts/blind.py predict reference_runs/blind_early_stop.csv reference_runs/plans/twentieth.yaml
python scripts/blind.py predict reference_runs/blind_float8.csv reference_runs/plans/float8-1gpu.yaml
python scripts/blind.py predict reference_runs/blind_float8_second.csv reference_runs/plans/float8-second-1gpu.yaml
python scripts/blind.py predict reference_runs/blind_te_eager.csv reference_runs/plans/te-eager-permutation.yaml
python scripts/blind.py predict reference_runs/blind_te_capacity.csv reference_runs/plans/te-capacity.yaml
python scripts/blind.py predict reference_runs/blind_te_capacity_hosts.csv reference_runs/plans/te-capacity-hosts.yaml
python scripts/blind.py predict reference_runs/blind_te_large_experts.csv reference_runs/plans/te-large-experts-fp8.yaml
python scripts/blind.py predict reference_runs/blind_fsdp1.csv reference_runs/plans/{fsdp1-2gpu,twenty-first}.yaml
python scripts/blind.py score

``predict`` writes step and memory of the plans' runs, as `mofa estimate` says them, on the profile's host and with the
routing that was asked for, and reference_runs/blind_layers.csv (the second held-out set of the chunked MoE layer on
one, two and four GPUs), unless the files are there: what is committed stays as it was predicted. ``score`` puts records
and measurements beside them.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from mofa.calibrate.chunked_check import QUANTITIES, rows_by_layer
from mofa.calibrate.chunked_layer import predict_bench_layer
from mofa.calibrate.shapes.chunked import chunked_layer_cases
from mofa.measure.records import read_records
from mofa.report.save import write_file_atomically
from mofa.search.one_plan import estimate
from mofa.specs.load import load_cluster, load_framework
from mofa.specs.run_files import load_runs, resolve_run
from mofa.validate.all_runs import layer_measurement_folders
from mofa.validate.reference import why_step_time_not_scored

ROOT = Path(__file__).resolve().parent.parent
REFERENCES = ROOT / "reference_runs"
SETS = (
    "blind",
    "blind_second",
    "blind_third",
    "blind_fourth",
    "blind_h100",
    "blind_fifth",
    "blind_sixth",
    "blind_seventh",
    "blind_eighth",
    "blind_h100_second",
    "blind_ninth",
    "blind_tenth",
    "blind_h100_third",
    "blind_h100_host",
    "blind_te_near",
    "blind_te_traced",
    "blind_te",
    "blind_te_four",
    "blind_te_traced_second",
    "blind_te_four_second",
    "blind_te_pp_fp8",
    "blind_te_layers",
    "blind_te_graphs",
    "blind_te_graphs_second",
    "blind_te_experts",
    "blind_te_experts_fp8",
    "blind_te_kernels",
    "blind_te_offload",
    "blind_te_two",
    "blind_te_overlap",
    "blind_te_short",
    "blind_drawn",
    "blind_drawn_h100",
    "blind_drawn_h200",
    "blind_drawn_third",
    "blind_drawn_fourth",
    "blind_drawn_fifth",
    "blind_early_stop",
    "blind_float8",
    "blind_float8_second",
    "blind_te_eager",
    "blind_te_capacity",
    "blind_te_capacity_hosts",
    "blind_te_large_experts",
    "blind_fsdp1",
)
RUNS = tuple(REFERENCES / f"{name}.csv" for name in SETS)
LAYERS = REFERENCES / "blind_layers.csv"
RUN_COLUMNS = ("id", "step_s", "allocated_bytes", "reserved_bytes", "device_bytes", "fits")
LAYER_COLUMNS = ("shape", *QUANTITIES)
GPUS = (1, 2, 4)
"""How many the layers are predicted on."""


def _runs(plans: Sequence[Path]) -> Iterator[dict[str, str]]:
    for path in plans:
        for run in load_runs(path):
            workload, cluster, framework, strategy = resolve_run(run, path.parent)
            plan = estimate(workload, cluster, strategy, framework=framework)
            yield {
                "id": run.id,
                "step_s": f"{plan.step_s:.6g}",
                **{name: f"{getattr(plan.memory, name):.0f}" for name in RUN_COLUMNS[2:5]},
                "fits": str(plan.memory.fits).lower(),
            }


def _layers() -> Iterator[dict[str, str]]:
    framework = load_framework("torchtitan")
    for gpus in GPUS:
        for case in chunked_layer_cases(gpus):
            if case.split == "fresh" and case.shape_size("ep") == gpus:
                said = predict_bench_layer(case.shape, load_cluster("h200-hgx", gpus), framework)
                yield {"shape": case.shape_text, **{q: f"{getattr(said, f):.6g}" for q, f in QUANTITIES.items()}}


def predict(out: Path, plans: Sequence[Path]) -> None:
    """Write what is predicted of runs and layers, each file once."""
    for path, columns, rows in ((out, RUN_COLUMNS, _runs(plans)), (LAYERS, LAYER_COLUMNS, _layers())):
        if path.exists():
            print(f"{path} is there and stays")
            continue
        lines = [",".join(columns), *(",".join(row[name] for name in columns) for row in rows)]
        write_file_atomically(path, ("\n".join(lines) + "\n").encode())


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _summary(errors: dict[str, list[float]]) -> None:
    for name, found in errors.items():
        if found:
            worst = max(found, key=abs)
            print(
                f"{name}: mean {fmean(map(abs, found)):.1%}, bias {fmean(found):+.1%}, worst {worst:+.1%}, {len(found)}"
            )


def score() -> None:
    """Print every run and layer that was measured beside what had been predicted, and the mean errors."""
    for path in RUNS:
        print(path.name)
        _score_runs(path)
    _score_layers()


def _score_runs(path: Path) -> None:
    records = {record.run.id: record for record in read_records(REFERENCES / "measured")}
    errors: dict[str, list[float]] = {name: [] for name in ("step", "allocated", "reserved", "device")}
    for row in _read(path):
        record = records.get(row["id"])
        if record is None:
            print(f"{row['id']}: not measured")
            continue
        if record.measured.outcome == "oom":
            print(f"{row['id']}: out of memory, predicted to fit: {row['fits']}")
            continue
        ranks, step_s = record.measured.ranks, record.measured.step_time_s
        assert step_s is not None
        device = [rank.peak_device_bytes for rank in ranks]
        measured = {
            "step": step_s,
            "allocated": max(rank.peak_allocated_bytes for rank in ranks),
            "reserved": max(rank.peak_reserved_bytes for rank in ranks),
            "device": max((value for value in device if value is not None), default=None),
        }
        said = dict(zip(measured, (float(row[name]) for name in RUN_COLUMNS[1:5]), strict=True))
        off = {name: said[name] / value - 1 for name, value in measured.items() if value}
        why = why_step_time_not_scored(record)
        print(
            row["id"], record.split, *(f"{name} {error:+.1%}" for name, error in off.items()), *([why] if why else [])
        )
        for name, error in off.items():
            if name != "step" or why is None:
                errors[name].append(error)
    _summary(errors)


def _score_layers() -> None:
    measured = {
        (rows["step"].case.shape_text): rows
        for folder in layer_measurement_folders(REFERENCES)
        for rows in rows_by_layer(folder)
    }
    for gpus in GPUS:
        off: dict[str, list[float]] = {name: [] for name in QUANTITIES}
        for row in _read(LAYERS):
            rows = measured.get(row["shape"])
            if rows is None or f"ep={gpus} " not in row["shape"]:
                continue
            for name in QUANTITIES:
                if name in rows:
                    off[name].append(float(row[name]) / rows[name].sample.median_s - 1)
        print(f"layers on {gpus} GPU{'s' * (gpus > 1)}")
        _summary(off)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["predict", out, *plans] if plans:
            predict(Path(out), [Path(plan) for plan in plans])
        case ["score"]:
            score()
        case _:
            sys.exit("python scripts/blind.py predict OUT.csv PLAN.yaml ... | score")
