"""MemFine: its table 4 out of its own formulas, the rule for the number of chunks, and a controller's view."""

from __future__ import annotations

import numpy as np
import pytest

from mofa.errors import SpecError
from mofa.routing.chunks import (
    ActivationTerms,
    check_chunk_bins,
    choose_num_chunks,
    loads_expected_from_past,
    max_rows_without_chunks,
    memfine_layer_activations,
    memfine_layers_in_flight,
    memfine_static_bytes,
    micro_batches_in_flight_1f1b,
)
from mofa.routing.rank_load import max_rank_rows_over_mean
from mofa.specs.load import load_workload

GB = 1e9
BUDGET = 64.0 * GB
"""alpha M: 32 GPUs of 64 GB; alpha is not printed, 64.0 GB is between what trains and what does not."""
TABLE_4 = {
    ("I", 1): (43.0, 22.9, 65.9, False), ("I", 8): (43.0, 3.7, 46.7, True), ("I", 2): (43.0, 11.9, 54.9, True),
    ("II", 1): (39.5, 22.9, 62.4, True), ("II", 8): (39.5, 3.7, 43.2, True), ("II", 2): (39.5, 11.9, 51.4, True),
}  # fmt: skip
"""Static, active, all [GB] and whether it trains, by model and chunks: moe.md A.8 (of MACT the 2 of its text)."""
MODEL = load_workload("memfine-model-1").model
TERMS = memfine_layer_activations(MODEL, 4096)


def rows_of_the_fullest_rank() -> float:
    """Not printed: derived from the row without chunks."""
    return (22.9 * GB - TERMS.fixed_bytes) / TERMS.bytes_per_row


@pytest.mark.parametrize("key", TABLE_4)
def test_table_4(key: tuple[str, int]) -> None:
    """Active memory of 2 and 8 chunks is predicted from the row of 1, within 3 %; verdicts are all right."""
    static, active, whole, trains = TABLE_4[key]
    found = TERMS.activation_bytes(rows_of_the_fullest_rank(), key[1]) / GB
    assert found == pytest.approx(active, rel=0.03)
    assert static + found == pytest.approx(whole, rel=0.03)
    assert ((static + found) * GB <= BUDGET) == trains


def test_static_memory_is_not_derivable() -> None:
    """Models I and II are 8 layers apart: 3.5 GB in table 4, 5.6 GB of bf16 weights of a rank's 8 experts alone, and
    more by equation 1 with the layers on 1 or over 4 stages."""
    assert MODEL.moe is not None
    expert = 3 * MODEL.hidden * MODEL.moe.expert_hidden
    assert 8 * 8 * expert * 2 / GB == pytest.approx(5.64, abs=0.01)
    for layers in (8, 2):
        assert memfine_static_bytes(MODEL, layers, 32, 2 + 2) / GB > 43.0 - 39.5
    assert memfine_static_bytes(MODEL, 16, 32, 20.0) == pytest.approx(
        16 * 20 * (8 * expert + 3 * MODEL.hidden * 2048 + 187.1e6 + 256 * MODEL.hidden), rel=1e-3
    )


def test_the_derived_rows_are_above_the_printed_cap_and_below_the_true_one() -> None:
    """moe.md A.9: about 595,000 to 600,000 rows; e * s is 131,072, e * s * min(top_k, 8 experts) 1,048,576."""
    rows = rows_of_the_fullest_rank()
    assert MODEL.moe is not None
    assert 590_000 < rows < 600_000
    assert 32 * 4096 < rows < max_rank_rows_over_mean(MODEL.moe, 32) * 4096 * 8


def test_mact_on_table_4() -> None:
    """Equations 8 and 9: model I needs two chunks, model II one, which both train."""
    rows = np.array([[rows_of_the_fullest_rank()]])
    for static, chunks in ((43.0, 2), (39.5, 1)):
        most = max_rows_without_chunks(BUDGET - static * GB, TERMS)
        assert choose_num_chunks(rows, most).item() == chunks


def test_percentages_of_the_text() -> None:
    """moe.md A.8: 83.84 % less with 8 chunks, 48.03 % with 2."""
    rows = rows_of_the_fullest_rank()
    assert 1 - TERMS.activation_bytes(rows, 8) / TERMS.activation_bytes(rows) == pytest.approx(0.8384, abs=0.005)
    assert 1 - TERMS.activation_bytes(rows, 2) / TERMS.activation_bytes(rows) == pytest.approx(0.4803, abs=0.005)


def test_activations_in_flight() -> None:
    """Printed: (v - 1) p + 2 (p - r - 1) + 1, Megatron's warm-up of chunks plus one; plain 1F1B holds p - r."""
    for pp in (1, 2, 4):
        for r in range(pp):
            assert memfine_layers_in_flight(pp, r, 2) == pp + 2 * (pp - r - 1) + 1
            assert micro_batches_in_flight_1f1b(pp, r) == pp - r <= memfine_layers_in_flight(pp, r)


def test_layers_in_flight_share_the_budget() -> None:
    terms = ActivationTerms(1.0, 2.0)
    rows = max_rows_without_chunks(100.0, terms, 4)
    assert 4 * terms.activation_bytes(rows) == pytest.approx(100.0)
    assert max_rows_without_chunks(0.5, terms) < 0


def test_bins() -> None:
    rows = np.array([[1.0, 100.0, 100.0001, 250.0, 799.0, 801.0]])
    assert choose_num_chunks(rows, 100.0).tolist() == [[1, 1, 2, 4, 8, 0]]
    assert choose_num_chunks(rows, 100.0, [3]).tolist() == [[3, 3, 3, 3, 0, 0]]
    assert choose_num_chunks(rows, -1.0).tolist() == [[0] * 6]
    assert choose_num_chunks(np.array([[100.0, 100.0]]), np.array([50.0, 200.0])).tolist() == [[2, 1]]
    for wrong in ([], [0, 1], [1, 65]):
        with pytest.raises(SpecError, match="bins"):
            check_chunk_bins(wrong)


def test_a_controller_sees_the_past_alone() -> None:
    ratios = np.array([[1.0, 3.0], [2.0, 1.0], [5.0, 1.0], [1.0, 1.0]])
    seen = loads_expected_from_past(ratios, window=2, headroom=1.0)
    assert seen[1:].tolist() == [[1.0, 3.0], [2.0, 3.0], [5.0, 1.0]] and np.isinf(seen[0]).all()
    with pytest.raises(SpecError, match="window"):
        loads_expected_from_past(ratios, window=0)
    with pytest.raises(SpecError, match="headroom"):
        loads_expected_from_past(ratios, headroom=float("nan"))


def test_a_dense_model_has_no_chunks() -> None:
    with pytest.raises(SpecError, match="no layer with experts"):
        memfine_layer_activations(load_workload("llama3-8b").model, 4096)
