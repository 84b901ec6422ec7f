"""Long runs as text and as figures, of results built by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest

from mofa.faults.calculator import calculate_goodput
from mofa.faults.ledger import Ledger
from mofa.plan.goodput_by_scale import GoodputReport, ScalePoint, Sensitivity, VariantPoint
from mofa.plan.long_run import CheckpointLevel, Days, LongRunDetail
from mofa.plan.result import Plan
from mofa.report.figures.goodput_curve import plot_goodput_curve
from mofa.report.figures.tornado import plot_tornado
from mofa.report.goodput import print_goodput_by_scale, print_goodput_calculation
from mofa.report.long_run import LEDGER_WORDS, print_long_runs
from mofa.report.tables import make_console
from mofa.search.long_run.goodput_by_scale import VARIANTS
from tests.report.fake import FRAMEWORK, WORKLOAD, make_plan

LEVELS = (
    CheckpointLevel(where="peers", every=1, block_s=2.0, persist_s=0.0),
    CheckpointLevel(where="storage", every=3, block_s=2.0, persist_s=30.0),
)
LEDGER = Ledger(productive=0.9, checkpoint=0.04, lost=0.03, restart=0.02, waiting=0.01)


def with_long_run(**changes: Any) -> Plan:
    plan = make_plan()
    detail = LongRunDetail(
        faults="toy", mode="peer", recovery="checkpoint", num_replicas=1, mtbf_s=7200.0, spares=2,
        whole_checkpoint_bytes=1e12, block_s=2.0, persist_s=30.0,
        safe_every=3, levels=LEVELS, restart_s=300.0, host_bytes_per_node=1e11, watts_per_gpu=1200.0, ledger=LEDGER,
    )  # fmt: skip
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    known = {
        "ettr": 0.9, "checkpoint_interval_s": 600.0, "effective_tokens_per_s_per_gpu": 1800.0,
        "days": Days(p10=99.0, p50=100.0, p90=101.0), "gpu_hours": 1e5, "usd": None, "kwh": 1.2e5,
        "unknown": {"usd": "no price given"}, "long_run": detail,
    }  # fmt: skip
    return Plan(**{**fields, **known, **changes})


def report(*, host_memory_fits: bool = True) -> GoodputReport:
    def variant(ettr: float) -> VariantPoint:
        ledger = Ledger(productive=ettr, checkpoint=1 - ettr, lost=0, restart=0, waiting=0)
        return VariantPoint(
            mode="async", recovery="checkpoint", spares=3, num_gpus=40, global_batch=256, strategy=strategy,
            step_s=8.0, ettr=ettr,
            checkpoint_interval_s=60.0, effective_tokens_per_s_per_gpu=1e3 * ettr,
            host_memory_fits=host_memory_fits, ledger=ledger,
        )  # fmt: skip

    strategy = make_plan().strategy
    points = [
        ScalePoint(num_gpus=n, global_batch=256, strategy=strategy, step_s=8.0, tokens_per_s_per_gpu=1e3, mtbf_s=1e4,
                   why=None, variants={name: variant(1 - n / 1e4) for name, _, _ in VARIANTS})
        for n in (64, 128)
    ]  # fmt: skip
    points.append(ScalePoint(num_gpus=256, global_batch=256, strategy=None, step_s=None, tokens_per_s_per_gpu=None,
                             mtbf_s=None, why="no dp divides the batch", variants={}))  # fmt: skip
    factors = tuple(Sensitivity(factor=f, ettr_halved=0.99, ettr_doubled=0.97) for f in ("failure rate", "storage"))
    return GoodputReport(
        workload=WORKLOAD, node="toy-hgx", framework=FRAMEWORK, faults="toy", weak=False, replan=False,
        points=tuple(points), sensitivity=factors, sensitivity_num_gpus=128, sensitivity_ettr=0.9872,
    )  # fmt: skip


def test_a_long_run_is_printed_whole() -> None:
    out = io.StringIO()
    print_long_runs(make_console(out), [with_long_run()], asked=True)
    text = out.getvalue()
    for words in ("90.00%", "100.0 (99.0-101.0)", "600.00 s", "no price given", "usd", "2 spare nodes", "a model",
                  "storage every 3., blocking 2.00 s, there 30.00 s later", *LEDGER_WORDS.values()):  # fmt: skip
        assert words in text, words
    assert "USD" not in text  # nobody gave a price
    silent = io.StringIO()
    print_long_runs(make_console(silent), [make_plan()], asked=False)
    assert silent.getvalue() == ""


def test_the_row_of_a_plan_has_its_long_run() -> None:
    row = with_long_run().to_row()
    assert (row["ettr"], row["days_p10"], row["days_p90"], row["usd"]) == (0.9, 99.0, 101.0, None)
    assert make_plan().to_row()["days_p50"] is None


@pytest.mark.parametrize("quantity", ["ettr", "throughput"])
def test_the_curve_has_a_line_per_variant(quantity: Any) -> None:
    ax = plot_goodput_curve(report(), quantity)
    lines = [line for line in ax.get_lines() if len(line.get_xdata())]
    assert len(lines) == len(VARIANTS) + (quantity == "throughput")
    assert list(lines[-1].get_xdata()) == [64, 128]
    expected = [0.9936, 0.9872] if quantity == "ettr" else [993.6, 987.2]
    assert list(lines[-1].get_ydata()) == pytest.approx(expected)
    of = {line.get_label(): line for line in lines}
    for under, over in (("async", "peer replicas"), ("async, spares", "peer replicas, spares")):
        assert of[under].get_linewidth() > 2 * of[over].get_linewidth()  # shows where both are one
        assert of[under].get_linestyle() == "-" != of[over].get_linestyle()


def test_the_tornado_has_a_pair_of_bars_per_factor() -> None:
    ax = plot_tornado(report())
    assert len(ax.patches) == 4
    assert [label.get_text() for label in ax.get_yticklabels()] == ["failure rate", "storage"]


def test_scales_are_printed_with_what_has_no_plan() -> None:
    out = io.StringIO()
    print_goodput_by_scale(make_console(out), report(host_memory_fits=False))
    for words in ("99.36%", "spares", " 3 ", "no dp divides the batch", "host memory", "Key factors", "failure rate",
                  "batch is fixed"):  # fmt: skip
        assert words in out.getvalue(), words


def test_the_calculator_is_printed() -> None:
    out = io.StringIO()
    print_goodput_calculation(make_console(out), calculate_goodput(21600.0, 300.0, 600.0, num_runs=50, days=2.0))
    for words in ("Young", "3402.84 s", "0.8194", "Simulated", "Meta"):
        assert words in out.getvalue(), words
    hopeless = io.StringIO()
    print_goodput_calculation(make_console(hopeless), calculate_goodput(60.0, 3600.0, 3600.0))
    assert "Not simulated" in hopeless.getvalue()
