"""Counts the parameters of each layer of transformers' own models, built without memory from ``config.json`` files.

Its output is the table ``tests/specs/layer_counts.csv``, to which ``tests/specs/test_layer_counts.py`` holds mofa's
layers of several kinds::

    python -m venv transformers-venv && transformers-venv/bin/pip install torch 'transformers==5.24.0'
    transformers-venv/bin/python scripts/layer_counts.py tests/specs/configs > tests/specs/layer_counts.csv

A model of :data:`MODEL_TYPES` has a row for each number of parameters that some of its layers have.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from model_counts import CORRECTION, experts_without_weights, language_config
from transformers import AutoModelForCausalLM

COLUMNS = ("config", "layers", "parameters", "correction_biases", "without_weights", "transformers")
MODEL_TYPES = (
    "bamba", "deepseek_v32", "deepseek_v4", "falcon_h1", "glm_moe_dsa", "granitemoehybrid", "jamba", "kimi_linear",
    "longcat_flash", "mimo_v2_flash", "minimax", "nemotron_h", "qwen3_5_moe", "qwen3_next",
)  # fmt: skip
"""Model types of transformers whose layers are of several kinds, or hold more than plain ones."""
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def main() -> None:
    """Print the table of counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of config.json files")
    transformers.logging.set_verbosity_error()
    table = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    table.writeheader()
    for file in sorted(parser.parse_args().folder.glob("*.json")):
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw["model_type"] not in MODEL_TYPES:
            continue
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(language_config(raw))
        for row in rows_of(model):
            table.writerow({"config": file.stem, "transformers": transformers.__version__, **row})
        sys.stdout.flush()


def rows_of(model: Any) -> Iterator[dict[str, Any]]:
    """Parameters of each layer, layers with the same numbers in one row."""
    parameters: Counter[int] = Counter()
    biases: Counter[int] = Counter()
    unused: Counter[int] = Counter()
    for name, tensor in model.named_parameters():
        if (place := LAYER.search(name)) is not None:
            parameters[int(place[1])] += tensor.numel()
    for name, tensor in model.named_buffers():
        if (place := LAYER.search(name)) is not None and name.endswith(CORRECTION):
            biases[int(place[1])] += tensor.numel()
    for name, module in model.named_modules():
        if (place := LAYER.search(f"{name}.")) is not None:
            unused[int(place[1])] += experts_without_weights(module)
    rows = defaultdict(list)
    for layer in sorted(parameters):
        rows[parameters[layer], biases[layer], unused[layer]].append(layer)
    for (total, bias, idle), layers in rows.items():
        yield {
            "layers": spans(layers), "parameters": total, "correction_biases": bias, "without_weights": idle,
        }  # fmt: skip


def spans(layers: list[int]) -> str:
    """Numbers of layers as first-last, with blanks between."""
    groups: list[list[int]] = []
    for layer in layers:
        if groups and groups[-1][-1] == layer - 1:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return " ".join(f"{group[0]}-{group[-1]}" for group in groups)


if __name__ == "__main__":
    main()
