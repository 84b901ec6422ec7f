"""Parameters and defaults of every architecture that is read, against transformers' own models and classes.

``model_counts.csv`` and ``class_defaults_*.json`` are the output of ``scripts/model_counts.py``, which says how they
are made. The configs are public ones, shortened to what a reader of their class looks at, and one a class that names
nothing but the class, then each of its switches.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from mofa.specs.huggingface import read_config
from mofa.specs.huggingface.record import ConfigFamily
from mofa.specs.huggingface.registry import ARCHITECTURES
from mofa.specs.params import num_params

HERE = Path(__file__).parent
PUBLIC = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in (HERE / "configs").glob("*.json")}
LINES = [json.loads(line) for line in (HERE / "configs" / "options.jsonl").read_text(encoding="utf-8").splitlines()]
CONFIGS: dict[str, dict[str, Any]] = {**PUBLIC, **{line["name"]: line["config"] for line in LINES}}
COUNTS = {
    row["config"]: row for row in csv.DictReader((HERE / "model_counts.csv").read_text(encoding="utf-8").splitlines())
}


def _type_of_class(architecture: ConfigFamily) -> str:
    """The model type by which transformers knows a class; of the text part where it is a part."""
    types = architecture.model_types
    return next((name for name in types if name.endswith("_text")), types[0])


OF_TRANSFORMERS = [a for a in ARCHITECTURES if not a.remote]
VERSIONS = {
    version: json.loads((HERE / f"class_defaults_{version}.json").read_text(encoding="utf-8"))
    for version in ("5.24", "4.57")
}


def test_every_config_has_a_row_and_every_row_a_config() -> None:
    assert set(CONFIGS) == set(COUNTS)


def test_parameters_are_those_of_the_class_to_the_unit() -> None:
    """transformers keeps some routers' correction bias as a buffer; mofa counts it, as released weights hold it."""
    counted = sorted(name for name, row in COUNTS.items() if not row["left_out"])
    expected = {name: int(COUNTS[name]["parameters"]) + int(COUNTS[name]["correction_biases"]) for name in counted}
    assert {name: num_params(read_config(CONFIGS[name], name).model) for name in counted} == expected


def test_only_classes_of_published_code_have_no_count() -> None:
    remote = {name for a in ARCHITECTURES if a.remote for name in a.classes}
    left_out = {CONFIGS[name]["architectures"][0] for name, row in COUNTS.items() if row["left_out"]}
    assert left_out <= remote


def test_every_class_is_counted_by_its_defaults_alone() -> None:
    """A config that names its class, and what that class cannot do without, has the class's own size."""
    assert [kind for kind in map(_type_of_class, OF_TRANSFORMERS) if f"{kind}, defaults" not in COUNTS] == []


OTHER_DEFAULTS = {
    # A vision model's own class decides, and it ties nothing.
    ("qwen3_vl_moe_text", "tie_word_embeddings"),
    # The switch is off, and then the class sets no window, by whatever number.
    ("qwen2_moe", "sliding_window"),
    # Both mean the last layer, of which the class writes the index.
    ("ernie4_5_moe", "moe_layer_end_index"),
    # transformers 4.57 has the vocabulary of another release.
    ("deepseek_v2", "vocab_size"),
}
"""Defaults that mofa takes otherwise, by model type and key."""


def test_absent_keys_take_the_default_of_the_class() -> None:
    for version, known in VERSIONS.items():
        for architecture in OF_TRANSFORMERS:
            if known[_type_of_class(architecture)]:
                assert_defaults_of_class(version, architecture)


def assert_defaults_of_class(version: str, architecture: ConfigFamily) -> None:
    """Of a class as one version of transformers has it."""
    model_type = _type_of_class(architecture)
    fields = VERSIONS[version][model_type]
    assert fields["class"] == architecture.config_class
    needed = CONFIGS[f"{model_type}, defaults"]
    for key, rule in architecture.keys.items():
        for name in rule.names or (key,):
            if name not in fields or name in needed or (model_type, name) in OTHER_DEFAULTS:
                continue
            derived = rule.default is None and fields[name] is not None
            unknown = name == "tie_word_embeddings" and fields[name] is None  # the text part of a vision model
            told = version, model_type, name, rule.default, fields[name]
            assert derived or unknown or rule.default == fields[name], told
