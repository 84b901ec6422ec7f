"""Predictions beside measurements, built by hand: long names and the largest and smallest numbers that occur."""

from __future__ import annotations

from typing import Any, get_args

from mofa.calibrate.chunked_check import MeasuredAndPredictedLayer
from mofa.search.experts.chunk_choice import JointRecomputeAndChunks, LayerRecomputeAndChunks
from mofa.search.experts.token_chunks import ChunkPolicy, ChunkReport
from mofa.units import GIB
from mofa.validate.attribute import Attribution, Family, FamilySeconds
from mofa.validate.coverage import BandCoverage
from mofa.validate.score import group_score
from mofa.validate.validation_report import RepeatScore, RunScore, ValidationReport, compare_with_measured

LONG_NAME = "te2-cp2-allgather-llama8b-5l-16k-traced-warm"
"""As long as names of configurations get."""


def make_chunk_report(num_layers: int = 12, iterations: int = 10) -> ChunkReport:
    """Token chunks of layers that need more of them the deeper they are, with a joint choice."""
    policies = tuple(
        ChunkPolicy(
            name=name,
            fits=over == 0,
            over=over,
            peak_bytes=peak * GIB,
            step_s=step_s,
            tokens_per_s_per_gpu=122880 / step_s,
            mean_chunks=mean,
            steps_s=(step_s,) * iterations,
            peaks_bytes=(peak * GIB,) * iterations,
        )
        for name, over, peak, step_s, mean in (
            ("fixed 1", 1260, 1097.98, 45.99, 1.0), ("fixed 8", 0, 72.04, 149.15, 8.0), ("mact", 0, 75.84, 46.44, 2.12),
        )
    )  # fmt: skip
    layers = tuple(range(3, 3 + num_layers))
    return ChunkReport(
        workload="memfine-model-2",
        strategy="ep=32 micro_batch=1 recompute=full",
        routing="memfine-iteration-7",
        bins=(1, 2, 4, 8),
        limit_bytes=77.5 * GIB,
        tokens_per_gpu=122880.0,
        max_rows={c: tuple(1000.0 * int(c) * (1 + s) for s in range(8)) for c in ("1", "2", "4", "8")},
        largest_rows=597_312.0,
        layers=layers,
        chunks=tuple(tuple((0, 1, 2, 4, 8)[(i + layer) % 5] for layer in layers) for i in range(iterations)),
        policies=policies,
        joint=JointRecomputeAndChunks(
            step_s=45.1,
            bound_s=44.9,
            optimal=False,
            uniform="selective:layernorm+mla_up_proj+mlp+moe_act, 4 chunks",
            uniform_step_s=47.3,
            model_error_bytes=0.1 * GIB,
            layers=tuple(
                LayerRecomputeAndChunks(layer=x, stage=0, recompute="selective", token_chunks=4) for x in layers
            ),
        ),
        joint_asked=True,
    )


def make_attribution() -> Attribution:
    """Every family of kernels, with errors that cancel."""
    families = get_args(Family)
    return Attribution(
        measured_step_s=1.2345,
        predicted_step_s=1.1999,
        families=tuple(
            FamilySeconds(family=name, kernels=10**i, measured_s=0.2, predicted_s=0.2 + (-1) ** i * 0.03)
            for i, name in enumerate(families)
        ),
        recompute_s=0.123,
        bubble_s=0.00123,
        notes=(
            "its own host: one small op in 9.43 us, where a typical one takes 9.37",
            "routing as its routers counted",
        ),
    )


def make_check() -> dict[str, Any]:
    """What ``mofa calibrate check --by-op`` knows."""
    errors = {"points": 1217, "median_abs_error": 0.017, "p90_abs_error": 0.085, "bias": -0.001, "extrapolated": 111}
    names = ("attention", "collective", "gemm", "grouped_gemm", "memory_bound", "dependent_collective")
    return {
        "families": dict.fromkeys(names, errors),
        "ops": {"memory_bound compiled cross_entropy_bwd": errors, "collective nccl all_to_all_uneven": errors},
    }


def make_layers() -> list[MeasuredAndPredictedLayer]:
    """Measured MoE layers of two groups."""
    values = {"peak_bytes": (10 * GIB, 10.1 * GIB), "reserved_bytes": (12 * GIB, 14 * GIB), "step": (0.100, 0.1123),
              "forward": (0.04, 0.05), "backward": (0.06, 0.0623)}  # fmt: skip
    shape = {"ep": 2, "hidden": 7168, "tokens": 16384, "skew": 0.25}
    return [MeasuredAndPredictedLayer("h200-2gpu", {**shape, "chunks": chunks}, values) for chunks in (1, 8)]


def make_validation() -> ValidationReport:
    """Runs of two groups with every verdict, repeats, and bands."""
    strategy = "tp=2 sp=true pp=4 ep=8 etp=1 dp=8 micro_batch=1 zero=1 recompute=selective:layernorm+moe_act"
    step_s, peak = compare_with_measured(12.345, 11.987), compare_with_measured(110.62 * GIB, 112.34 * GIB)
    repeat = RepeatScore(
        id=f"{LONG_NAME}-again", host_op_s=9.43e-6, step_time=step_s, notes=("12 of 20 steps count", "host of others")
    )
    runs = tuple(
        RunScore(
            id=f"{LONG_NAME[:-5]}-{i}",
            group=group,
            model="llama3-8b",
            gpu="h200-sxm",
            num_gpus=1024,
            framework="megatron-local compiled",
            strategy=strategy,
            step_time=step_s,
            peak_allocated=peak,
            peak_reserved=peak,
            peak_device=peak,
            ranks_allocated_errors=(0.01,),
            predicted_step_s=11.987,
            predicted_device_bytes=120 * GIB,
            fits=fits,
            out_of_memory=out_of_memory,
            denied_by="bloom-049" if fits and out_of_memory and i else None,
            provenance={"interpolated": 0.595, "transferred": 0.309, "extrapolated": 0.096},
            weak_fraction=0.096,
            exposed={"gemm": 11.987},
            played_out=True,
            source="measured",
            repeats=(repeat, repeat) if i else (),
        )
        for group in ("measured-te-judging", "published-nemolauncher-default-recompute")
        for i, (fits, out_of_memory) in enumerate(((True, True), (True, True), (True, False), (False, False)))
    )
    band = BandCoverage(
        group="one node, transformer-engine, bf16, experts below half, host-bound", bands=("one node",),
        fitted_runs=283, families=102, runs=35, inside=31, below=3, above=1, median_low=-0.097, median_high=0.077,
        median_width=0.174, tested=True,
    )  # fmt: skip
    groups = {name: group_score([run for run in runs if run.group == name]) for name in {run.group: 0 for run in runs}}
    return ValidationReport(groups=groups, false_fits=2, runs=runs, bands=(band, band), elapsed_s=12.3)
