"""Counts that model cards and papers print, total and active, against those of the model's config to their last digit.

``model_cards.csv`` says what a count counts, as cards differ, and where it is printed. Where the printed count is no
rounding of ours by any convention that its source names, the row says so.
"""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

from mofa.specs.huggingface import model_from_config
from mofa.specs.model import ModelSpec
from mofa.specs.params import (
    embedding_params,
    head_params,
    num_active_params,
    num_active_params_without_embedding,
    num_mtp_params,
    num_params,
)

HERE = Path(__file__).parent
ROWS = list(csv.DictReader((HERE / "model_cards.csv").read_text(encoding="utf-8").splitlines()))
UNITS = {"": 1, "M": 10**6, "B": 10**9, "T": 10**12}


def _model(name: str) -> ModelSpec:
    return model_from_config(json.loads((HERE / "configs" / f"{name}.json").read_text(encoding="utf-8")), name)


def _not_counted(model: ModelSpec, convention: str) -> int:
    """Parameters that a convention leaves out; negative where it counts more than the main model. [params]"""
    embeddings = embedding_params(model) + head_params(model)
    return {
        "all": 0,
        "no input embedding": num_active_params(model) - num_active_params_without_embedding(model),
        "no embeddings": embeddings,
        "no embeddings, with prediction layers": embeddings - num_mtp_params(model),
    }[convention]


def _digits(printed: str, count: int) -> tuple[str, str, str]:
    """The printed number, and a count rounded and cut off to as many digits, in its unit."""
    match = re.fullmatch(r"([\d,.]+)([MBT]?)", printed)
    assert match is not None, printed
    number = match[1].replace(",", "")
    decimals = len(number.partition(".")[2])
    value = count / UNITS[match[2]]
    return number, f"{value:.{decimals}f}", f"{math.floor(value * 10**decimals) / 10**decimals:.{decimals}f}"


def test_counts_agree_to_the_printed_digits() -> None:
    for row in ROWS:
        assert_agrees_to_the_printed_digits(row)


def assert_agrees_to_the_printed_digits(row: dict[str, str]) -> None:
    """Of a row of the cards, total and active parameters, but for what the row says of them."""
    model = _model(row["config"])
    differs = []
    for what, count in (("total", num_params(model)), ("active", num_active_params(model))):
        if not row[what]:
            continue
        printed, rounded, cut = _digits(row[what], count - _not_counted(model, row[f"{what}_counts"]))
        if printed != rounded:
            differs.append(f"{what} {'cut off, not rounded' if printed == cut else 'counted otherwise'}")
    assert "; ".join(differs) == row["differs"], row["config"]
    assert row["source"]


def test_at_least_sixty_models_agree() -> None:
    agree = {row["config"] for row in ROWS if not row["differs"]}
    with_active = {row["config"] for row in ROWS if not row["differs"] and row["active"]}
    assert len(agree) >= 130
    assert len(with_active) >= 20


def test_a_tied_embedding_is_used_as_the_output_layer() -> None:
    tied, untied = _model("Qwen--Qwen3-4B"), _model("Qwen--Qwen3-8B")
    assert num_active_params_without_embedding(tied) == num_params(tied)
    assert num_params(untied) - num_active_params_without_embedding(untied) == 151936 * 4096
