"""What the power limit and collectives cost, fitted by hand-made rows."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections import defaultdict
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest

from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.fits.fit import fit_curves
from mofa.calibrate.fits.loaded_clocks import (
    attention_clock_exponents,
    clock_dependent_time_shares,
    full_clock_product_rates,
    memory_bound_clock_ratio,
)
from mofa.calibrate.fits.profile import BETWEEN, power_limit_fields
from mofa.calibrate.measurements import Row
from mofa.specs.curves import PowerLimitedCurve
from mofa.specs.power import clock_at_power_draw
from tests.cost.toy import cluster

ROOT = Path(__file__).parents[2]


def row(family: str, op: str, variant: str, seconds: float, mhz: float | None = None, **shape: int) -> Row:
    case = Case(family, op, variant, "bf16", "grid", {"m": 8192, "n": 8192, "k": 8192, **shape})
    return Row(case, Sample(seconds, seconds, seconds, 7, mhz), "a GPU", "a host")


def test_clocks_of_kernels_alone_and_of_what_runs_between_them() -> None:
    """Products alone keep three quarters of 2 GHz, with memory-bound kernels between them four fifths: those alone
    would keep the clock that mixes to it."""
    rows = [
        row("sustained", "gemm", "burst", 1.0, 2000.0), row("sustained", "gemm", "2s", 1.2, 1500.0),
        row("sustained", "gemm", "between_memory", 1.15, 1600.0),
    ]  # fmt: skip
    assert fit_curves(rows, num_sms=132, gpu="a GPU").clocks["gemm bf16"] == 0.75
    alone = memory_bound_clock_ratio(rows, lambda num_rows: 1.15 * num_rows / 8192.0)  # as long as the product
    assert alone is not None
    assert clock_at_power_draw(np.array([0.5 * 0.75**-2 + 0.5 * alone**-2]))[0] == pytest.approx(0.8, rel=1e-4)


def test_kernels_that_wait_for_the_clock_have_a_share_that_grows() -> None:
    """A kernel that takes a tenth longer at four fifths of the clock: 0.4 of a quarter more."""
    rows = [
        replace(row("throttled", "silu", f"eager_{load}", seconds, mhz, tokens=8192, width=8192))
        for load, seconds, mhz in (("burst", 1.0, 2000.0), ("heavy", 1.1, 1600.0), ("medium", 1.0, 1990.0))
    ]
    assert clock_dependent_time_shares(rows) == {"eager silu": pytest.approx(0.4)}
    assert fit_curves(rows, num_sms=132, gpu="a GPU").clock_shares == {"eager silu": pytest.approx(0.4)}


def test_attention_behind_products_has_a_power_of_the_clock() -> None:
    rows = [
        row("te_throttled", "te_attention.fwd", load, seconds, mhz)
        for load, seconds, mhz in (("burst", 1.0, 2000.0), ("heavy", 1.25, 1600.0))
    ]
    assert attention_clock_exponents(rows) == {"attention_cudnn_fwd bf16": pytest.approx(1.0)}


def test_clocks_that_were_not_read_say_nothing() -> None:
    rows = [row("sustained", "gemm", v, t) for v, t in (("burst", 1.0), ("2s", 1.2), ("between_memory", 1.1))]
    assert fit_curves(rows, num_sms=132, gpu="a GPU").clocks == {}


def test_a_clock_under_no_load_is_another_gpus() -> None:
    """Seconds of products that drew no more power than was drawn before them: their clock says nothing."""

    def read(variant: str, mhz: float, watts: float) -> Row:
        plain = row("sustained", "gemm", variant, 1.0, mhz)
        return replace(plain, sample=replace(plain.sample, power_w=watts))

    idle = [read("burst", 1980.0, 123.8), read("2s", 1980.0, 123.1)]
    assert fit_curves(idle, num_sms=132, gpu="a GPU").clocks == {}
    loaded = [read("burst", 1980.0, 159.8), read("2s", 1301.0, 685.8)]
    assert fit_curves(loaded, num_sms=132, gpu="a GPU").clocks == {"gemm bf16": pytest.approx(1301 / 1980)}


def test_a_kind_whose_clock_was_not_read_takes_the_next_names() -> None:
    sustained = {f"gemm fp8_split {BETWEEN}": 0.9, "gemm fp8_split alone": 0.8}
    curves = replace(fit_curves([], num_sms=132, gpu="a GPU"), sustained=sustained, clocks={"gemm fp8": 0.64})
    assert power_limit_fields(curves, "gemm fp8_split", "gemm fp8") == {"sustained": 0.9, "alone": 0.8, "clock": 0.64}


def test_rate_at_a_clock_goes_through_both_measured_states() -> None:
    """Full rate at full clock, 0.85 at 0.75; a kernel whose rate did not fall keeps it at any clock."""
    curve = PowerLimitedCurve(provenance="assumed", source="an example", sustained=0.9, alone=0.85, clock=0.75)
    assert curve.relative_rate_at_clock(np.array([1.0, 0.75])) == pytest.approx([1.0, 0.85])
    steady = PowerLimitedCurve(provenance="assumed", source="an example", clock=0.97)
    assert steady.relative_rate_at_clock(np.array([0.7])) == pytest.approx([1.0])


def test_slowdown_counts_kernels_that_the_collective_outlasts() -> None:
    """4 s become 5 beside a collective of 6 s that takes 8: a fifth of 8 s over 6. A longer product says nothing."""
    times = {
        "stream_alone": 4.0, "stream_overlapped": 5.0, "collective_alone_stream": 6.0,
        "collective_overlapped_stream": 8.0, "gemm_alone": 20.0, "gemm_overlapped": 20.5, "collective_alone_gemm": 6.0,
        "collective_overlapped_gemm": 9.0,
    }  # fmt: skip
    rows = [row("overlap", "all_gather", variant, seconds) for variant, seconds in times.items()]
    assert fit_curves(rows, num_sms=132, gpu="a GPU").overlap_slowdown == pytest.approx(0.2 * 8 / 6)
    assert fit_curves([], num_sms=132, gpu="a GPU").overlap_slowdown == 0.0


def test_layers_beside_a_collective_say_more_than_kernels() -> None:
    """Two layers lose 1 s and 2 s beside collectives of 2 s and 8 s: 0.3; what the stream beside them lost is left."""
    times = {
        "stream_alone": 4.0, "stream_overlapped": 5.0, "collective_alone_stream": 6.0,
        "collective_overlapped_stream": 8.0, "layer_alone": 20.0, "layer_overlapped": 21.0,
        "collective_alone_layer": 2.0,
    }  # fmt: skip
    rows = [row("overlap", "all_gather", variant, seconds) for variant, seconds in times.items()]
    longer = {"layer_alone": 40.0, "layer_overlapped": 42.0, "collective_alone_layer": 8.0}
    rows += [row("overlap", "reduce_scatter", variant, seconds) for variant, seconds in longer.items()]
    assert fit_curves(rows, num_sms=132, gpu="a GPU").overlap_slowdown == pytest.approx(0.3)


def test_full_load_is_the_rate_of_the_products_whose_clock_was_read() -> None:
    rows = [row("sustained", "gemm", v, t, c) for v, t, c in (("burst", 1e-3, 2000.0), ("2s", 1.2e-3, 1500.0))]
    assert full_clock_product_rates(rows) == {"gemm bf16": pytest.approx(2.0 * 8192**3 / 1e-3)}
    between = row("sustained", "gemm", "between_memory", 1.1e-3, 1600.0)
    fields = power_limit_fields(fit_curves([*rows, between], num_sms=132, gpu="a GPU"), "gemm bf16")
    assert fields["full_load_flops"] == pytest.approx(2.0 * 8192**3 / 1e-3)


def products_with_draws() -> list[dict[str, str]]:
    with (ROOT / "measurements" / "h200-1gpu-draws" / "draws.csv").open(encoding="utf-8") as file:
        return [one for one in csv.DictReader(file) if one["k"] and (int(one["m"]) >= 1024 or "fp32" in one["kernel"])]


@pytest.mark.parametrize("read", products_with_draws(), ids=lambda read: f"{read['kernel']} {read['m']} x {read['n']}")
def test_products_draw_by_their_load(read: dict[str, str]) -> None:
    """Alone on an H200: clocks of 13 products at 0.17 to 1 of full load, by the draw of each."""
    curves = cluster(node="h200-hgx").gpu.curves
    bf16, memory = curves.gemm["bf16"], curves.stream_clock
    assert memory is not None
    seconds = float(read["rested_us"]) * 1e-6 / bf16.sustained  # as between memory-bound kernels
    load = bf16.fraction_of_full_load(2.0 * int(read["m"]) * int(read["n"]) * int(read["k"]), seconds)
    told = float(clock_at_power_draw(bf16.draw_over_power_limit(load, memory.value**-2)))
    assert told == pytest.approx(int(read["sm_mhz"]) / 1980, rel=0.08)


def test_the_loss_of_megatron_takes_its_own_time_and_draw() -> None:
    """12.5 ps a logit forward on an H200 at full clock, 15.4 on an H100 in its steps; each less than the limit."""
    for node, per_logit in (("h200-hgx", 12.5e-12), ("h100-hgx", 15.4e-12)):
        curve = cluster(node=node).gpu.curves.memory_bound_curve_like("megatron loss_fwd", False)
        assert 38.0 / curve.form.bytes_per_s == pytest.approx(per_logit, rel=0.01)
        assert curve.draw is not None and curve.draw < 1.0


def _settled_clock(products_ms: float, beside_ms: float, draw: float, alone: float, settles_ms: float) -> float:
    """Mean clock of products in turn with something that draws ``draw``, over the full clock.

    The draw whose inverse square root is the clock moves exponentially from that of one phase to that of the other.
    """
    product = alone**-2
    left, stayed = math.exp(-products_ms / settles_ms), math.exp(-beside_ms / settles_ms)
    begin = (draw * (1.0 - stayed) + product * (1.0 - left) * stayed) / (1.0 - left * stayed)
    mean = product + (begin - product) * settles_ms / products_ms * (1.0 - left)
    return float(mean**-0.5)


def test_bursts_give_how_fast_the_clock_follows() -> None:
    """Products of 60 to 1500 ms beside fused Adam or a wait on an H200: told within 4 % by 25 ms."""
    limit = cluster(node="h200-hgx").gpu.curves.power_limit
    assert limit is not None and limit.settles_s is not None
    with (ROOT / "measurements" / "h200-1gpu-draws" / "bursts.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    (alone_us,) = [float(row["per_product_us"]) for row in rows if row["beside"] == "nothing"]
    full_us, draws = alone_us * 1464 / 1980, {"adam": 603 / 700, "idle": limit.idle_draw.value}
    for row in rows[:-1]:
        took_us, times = float(row["per_product_us"]), (float(row["products_ms"]), float(row["beside_ms"]))
        told = _settled_clock(*times, draws[row["beside"]], 1464 / 1980, limit.settles_s.value * 1e3)
        assert told == pytest.approx(full_us / took_us, rel=0.04), row


def _full_clock_and_optimizer_ms(trace: str) -> tuple[float, float]:
    """When a traced step's products become slower than at its beginning, for good; and its optimizer. [ms]

    Products of one kernel and nearly one length count over the shortest of them. A step is slower from the first of
    seven in a row whose median is over the middle between the full clock and the rest of the step.
    """
    with gzip.open(ROOT / "reference_runs" / "traces" / f"{trace}.0.json.gz", "rt", encoding="utf-8") as file:
        kernels = sorted(json.load(file)["kernels_us"], key=itemgetter(2))
    alike: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for _, name, start, took in kernels:
        if took > 100.0 and ("nvjet" in name or "cudnn_gen" in name):
            alike[name, round(math.log(took) / 0.3)].append((start / 1e3, took))
    shown = [
        (start, took / min(t for _, t in same)) for same in alike.values() if len(same) > 3 for start, took in same
    ]
    times, ratios = np.array(sorted(shown)).T
    middle = (1.0 + float(np.mean(ratios[times > 0.5 * times[-1]]))) / 2.0
    slow = [times[i] for i in range(3, len(times)) if times[i] > 12.0 and np.median(ratios[i - 3 : i + 4]) > middle]
    end = max(start + took for _, _, start, took in kernels)
    return float(slow[0]), (end - next(k[2] for k in kernels if "l2norm" in k[1])) / 1e3


@pytest.mark.parametrize("trace", ["h200-te1-llama8b-4l-short4", "h200-te1-yi6b-8l-short1"])
def test_behind_an_optimizer_products_keep_the_full_clock_for_a_while(trace: str) -> None:
    """Steps of an H200 behind others: the full clock for 58 and 59 ms behind 23 ms, then all at once less."""
    limit = cluster(node="h200-hgx").gpu.curves.power_limit
    assert limit is not None
    full_ms, optimizer_ms = _full_clock_and_optimizer_ms(trace)
    (told_s,) = limit.full_clock_behind_optimizer_s(np.array([optimizer_ms / 1e3]))
    assert told_s * 1e3 == pytest.approx(full_ms, rel=0.2)
