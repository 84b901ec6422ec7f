"""What steps of an optimizer on a host reach, from rows that a known host would give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mofa.calibrate.fits.host_optimizer import host_optimizer_facts, host_optimizer_rates
from mofa.calibrate.measurements import Row, read_rows
from mofa.calibrate.shapes.families import FAMILIES, all_cases_of_family
from mofa.calibrate.shapes.host_ops import HOST_OPTIMIZER
from mofa.specs.host import HostOptimizerRates
from mofa.specs.load import load_cluster
from mofa.specs.optimizer_offload import ADAM_MOVED_BYTES, COPIED_BYTES

FOLDER = Path(__file__).resolve().parents[2] / "measurements" / "h200-host-optimizer"
THREAD, MEMORY, PAGEABLE = 2e10, 1.5e11, 8e9


def rows_of_a_known_host() -> list[Row]:
    (example, *_) = read_rows(FOLDER)

    def seconds(op: str, params: int, threads: int) -> float:
        if op == "adam_step":
            return ADAM_MOVED_BYTES * params * (1.0 / (threads * THREAD) + 1.0 / MEMORY)
        return COPIED_BYTES * params / PAGEABLE

    rows = []
    for case in all_cases_of_family(HOST_OPTIMIZER):
        threads = case.shape_size("threads") if case.op == "adam_step" else 1
        median_s = seconds(case.op, case.shape_size("params"), threads)
        rows.append(replace(example, case=case, sample=replace(example.sample, median_s=median_s)))
    return rows


def test_rates_are_found_again() -> None:
    rates = host_optimizer_rates(rows_of_a_known_host())
    assert rates == pytest.approx({"thread": THREAD, "memory": MEMORY, "pageable": PAGEABLE})


def test_facts_are_the_hosts() -> None:
    facts = HostOptimizerRates.model_validate(
        host_optimizer_facts(host_optimizer_rates(rows_of_a_known_host()), "a test")
    )
    assert facts.thread_bytes_per_s.value == pytest.approx(THREAD)
    assert facts.processors.provenance == "assumed"


def test_no_facts_come_of_half_the_rows() -> None:
    steps = [row for row in rows_of_a_known_host() if row.case.op == "adam_step"]
    assert host_optimizer_facts(host_optimizer_rates(steps), "a test") == {}
    assert host_optimizer_rates([]) == {}


def test_the_bundled_host_is_the_measured_one() -> None:
    rates = host_optimizer_rates(read_rows(FOLDER))
    host = load_cluster("h200-hgx", 8).gpu.curves.host.optimizer
    assert host is not None
    assert host.thread_bytes_per_s.value == pytest.approx(rates["thread"], rel=1e-3)
    assert host.memory_bytes_per_s.value == pytest.approx(rates["memory"], rel=1e-3)
    assert host.pageable_bytes_per_s.value == pytest.approx(rates["pageable"], rel=1e-3)


def test_the_fit_meets_large_tensors_within_its_words() -> None:
    """As the docstring of ``host_adam_bytes_per_s`` has it: 13 % at most."""
    rows = [row for row in read_rows(FOLDER) if row.case.op == "adam_step" and row.case.shape_size("params") >= 2**24]
    rates = host_optimizer_rates(rows)
    for row in rows:
        threads, params = row.case.shape_size("threads"), row.case.shape_size("params")
        predicted_s = ADAM_MOVED_BYTES * params * (1.0 / (threads * rates["thread"]) + 1.0 / rates["memory"])
        assert predicted_s == pytest.approx(row.sample.median_s, rel=0.135)


def test_it_is_measured_where_it_is_named() -> None:
    assert HOST_OPTIMIZER in FAMILIES
    assert all_cases_of_family(HOST_OPTIMIZER, quick=True) == []
