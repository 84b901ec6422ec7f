"""Counts the parameters of transformers' own models, built without memory from ``config.json`` files.

Its output is the table ``tests/specs/model_counts.csv``, to which ``tests/specs/test_model_counts.py`` holds mofa::

    python -m venv transformers-venv && transformers-venv/bin/pip install torch 'transformers==5.24.0'
    transformers-venv/bin/python scripts/model_counts.py tests/specs/configs > tests/specs/model_counts.csv

A folder's ``.json`` files hold one config each, its ``.jsonl`` files a name and a config in each line.

With ``--defaults`` it prints the defaults of configuration classes instead, as JSON: the tables
``tests/specs/class_defaults_*.json``, to which ``tests/specs/test_model_counts.py`` holds the records::

    python -c 'from mofa.specs.huggingface.registry import ARCHITECTURES as a; print(*(x.model_types[-1] for x in a))'
    transformers-venv/bin/python scripts/model_counts.py --defaults llama ... > tests/specs/class_defaults_5.24.json

With ``--types`` it prints the model types of which transformers has a causal language model, one a line: the table
``tests/specs/causal_lm_types.txt``, each of which docs/models.md names.

Nothing is fetched: a class whose code is published with its weights has no counts, and the reason in their place.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SAME_LAYERS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers lacks, whose published code is another's."""
WITHOUT_AUTO_CLASS = {"emu3_text_model": "Emu3ForCausalLM"}
"""Model types of language models that transformers' auto classes do not build, by their class."""
TOWERS = ".embed_tokens_extend."
"""Part of names of the parameters of images and sound within a language model's class (Phi-4 multimodal)."""
CORRECTION = "e_score_correction_bias"
"""A router's bias that transformers keeps as a buffer in some classes, as a parameter in others."""
COLUMNS = ("config", "class", "parameters", "correction_biases", "transformers", "left_out")


def main() -> None:
    """Print the table of counts, or that of defaults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="folder of config.json files")
    parser.add_argument("--defaults", nargs="+", metavar="MODEL_TYPE", help="print classes' defaults instead")
    parser.add_argument("--types", action="store_true", help="print model types of causal language models instead")
    asked = parser.parse_args()
    if asked.types:
        print(*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, sep="\n")
        return
    transformers.logging.set_verbosity_error()
    if asked.defaults:
        json.dump({name: class_defaults(name) for name in asked.defaults}, sys.stdout, indent=1, sort_keys=True)
        sys.stdout.write("\n")
        return
    if asked.folder is None:
        parser.error("a folder of config.json files, or --defaults, is missing")
    table = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    table.writeheader()
    for name, raw in configs(asked.folder):
        table.writerow({"config": name, "transformers": transformers.__version__, **counted(raw)})
        sys.stdout.flush()


def configs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and contents of a folder's configs."""
    for file in sorted(folder.glob("*.json")):
        yield file.stem, json.loads(file.read_text(encoding="utf-8"))
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield row["name"], row["config"]


def counted(raw: dict[str, Any]) -> dict[str, Any]:
    """Class and counts of a config's language model, or the reason why transformers has none."""
    try:
        config = language_config(raw)
    except KeyError as error:
        return {"left_out": f"transformers has no {error.args[0]}"}
    with torch.device("meta"):
        own = WITHOUT_AUTO_CLASS.get(config.model_type)
        try:
            model = getattr(transformers, own)(config) if own else AutoModelForCausalLM.from_config(config)
            head = 0
        except ValueError:  # the text part of a vision model, which has a head only as a whole
            model = AutoModel.from_config(config)
            tied = raw.get("tie_word_embeddings", getattr(config, "tie_word_embeddings", False))
            head = 0 if tied else config.vocab_size * config.hidden_size
    biases = sum(tensor.numel() for name, tensor in model.named_buffers() if name.endswith(CORRECTION))
    total = sum(tensor.numel() for name, tensor in model.named_parameters() if TOWERS not in name) + head
    total -= sum(map(experts_without_weights, model.modules()))
    return {"class": type(model).__name__, "parameters": total, "correction_biases": biases}


def experts_without_weights(module: Any) -> int:
    """Elements of experts that have a first product and no second: LongCat's zero experts, which no file has."""
    if not all(isinstance(getattr(module, name, None), torch.Tensor) for name in ("gate_up_proj", "down_proj")):
        return 0
    gate_up, down = module.gate_up_proj, module.down_proj
    return int((gate_up.shape[0] - down.shape[0]) * gate_up[0].numel())


def language_config(raw: dict[str, Any]) -> Any:
    """The configuration of the language model that a file describes, by transformers' own class."""
    nested = raw.get("text_config")
    named = raw.get("architectures", [""])[0]
    known = {name.lower() for name in dir(transformers)}
    if named.endswith("ForCausalLM") and named.lower() not in known:
        raise KeyError(named)
    fields = {**(nested or raw)}
    if nested and "tie_word_embeddings" in raw:
        fields.setdefault("tie_word_embeddings", raw["tie_word_embeddings"])
    model_type = fields.pop("model_type")
    model_type = SAME_LAYERS.get(model_type, model_type)
    if model_type not in CONFIG_MAPPING:
        raise KeyError(model_type)
    fields.pop("quantization_config", None)
    config = CONFIG_MAPPING[model_type](**fields)
    return config.get_text_config()


def class_defaults(model_type: str) -> dict[str, Any]:
    """The fields of a configuration class that is given none: no lists, and none that all classes have."""
    of_all = transformers.PretrainedConfig().to_dict()
    if model_type not in CONFIG_MAPPING:
        return {}
    config = CONFIG_MAPPING[model_type]()
    fields = {name: value for name, value in config.to_dict().items() if name not in of_all}
    nested = {
        f"{name}.{inner}": value
        for name, part in fields.items()
        if isinstance(part, dict)
        for inner, value in part.items()
        if inner not in of_all
    }
    tied = getattr(config, "tie_word_embeddings", None)
    plain = {name: value for name, value in {**fields, **nested}.items() if not isinstance(value, (list, dict))}
    return {"class": type(config).__name__, "tie_word_embeddings": tied, **plain}


if __name__ == "__main__":
    main()
