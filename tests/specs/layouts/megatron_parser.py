"""Megatron-Core's own parser of layouts, where its wheel is, and random texts to ask it about.

``python -m tests.specs.layouts.megatron_parser`` writes megatron_layouts.jsonl anew, with what the parser says.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mofa.specs.layouts.pipeline_layout import LayoutError, Rule, parse_layout

VERSION = "0.16.1"
RECORDED = Path(__file__).parent / "megatron_layouts.jsonl"
REFUSALS: dict[str, Rule] = {
    "Invalid layer character": "letter",
    "must be divisible": "stages",
    "The first layer must be embedding": "first",
    "The last layer must be loss": "last",
    "Embedding must be specified": "one embedding",
    "Loss must be specified": "one loss",
    "Number of decoder layers": "layers",
    "Number of mtp layers in layout": "predictions",
    "decoder layers must be placed before": "layers before predictions",
    "the MTP should be always in the last": "predictions in last chunks",
    "All of the MTP layers": "predictions together",
}
"""What Megatron says where it refuses, and the rule that this is here."""
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


class Asked(NamedTuple):
    """A text, and the pipeline and model that it is for."""

    text: str
    pp: int
    num_layers: int
    num_predictions: int | None


def megatron_folder() -> Path | None:
    """The folder of an installed megatron.core, or of an unpacked wheel that MEGATRON_CORE names; None without."""
    named = os.environ.get("MEGATRON_CORE")
    if named:
        return Path(named) / "megatron" / "core"
    found = importlib.util.find_spec("megatron")
    folders = [Path(place) / "core" for place in (found.submodule_search_locations if found else None) or ()]
    return next((folder for folder in folders if (folder / "transformer").is_dir()), None)


def megatron_parser(folder: Path) -> Any:
    """Megatron's class, loaded with its enum alone: the rest of the package needs torch."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    try:
        for name in ("megatron", "megatron.core", "megatron.core.transformer", "megatron.core.parallel_state"):
            sys.modules[name] = ModuleType(name)
        sys.modules["megatron.core"].parallel_state = sys.modules["megatron.core.parallel_state"]  # type: ignore[attr-defined]
        for name in ("enums", "pipeline_parallel_layer_layout"):
            spec = importlib.util.spec_from_file_location(
                f"megatron.core.transformer.{name}", folder / "transformer" / f"{name}.py"
            )
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        return module.PipelineParallelLayerLayout
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            del sys.modules[name]
        sys.modules.update(before)


def of_megatron(parser: Any, asked: Asked) -> list[str] | Rule:
    """The chunks that Megatron's parser gives along the model, or the rule that it says is broken."""
    try:
        layout = parser(asked.text, asked.pp)
        layout.validate_layer_layout(asked.num_layers, asked.num_predictions)
    except IndexError:  # of a layout without any module
        return "first"
    except AssertionError as error:
        return next(rule for words, rule in REFUSALS.items() if words in str(error))
    vpp = len(layout.layout[0])
    return [
        "".join(LETTERS[module.name] for module in layout.layout[rank][chunk])
        for chunk in range(vpp)
        for rank in range(asked.pp)
    ]


def of_mofa(asked: Asked) -> list[str] | Rule:
    """The same here."""
    try:
        layout = parse_layout(asked.text)
        layout.check_against_model(
            asked.pp, max(len(layout.chunks) // asked.pp, 1), asked.num_layers, asked.num_predictions or 0
        )
    except LayoutError as error:
        assert 0 <= error.position <= len(asked.text), asked
        return error.rule
    assert parse_layout(layout.text).chunks == layout.chunks, asked
    return list(layout.chunks)


def random_cases(seed: int) -> Iterator[Asked]:
    """Texts without end: some of random characters, most nearly right, and mostly with their own numbers of layers."""
    rng = random.Random(seed)
    while True:
        text = _garbage(rng) if rng.random() < 0.2 else _nearly_right(rng)
        try:
            written = "".join(parse_layout(text).chunks)
        except LayoutError:
            written = text
        layers = written.count("t") if rng.random() < 0.9 else rng.randint(0, 9)
        predictions = written.count("m") if rng.random() < 0.9 else rng.choice([None, 0, 1, 2])
        yield Asked(text, rng.choice([1, 2, 4]), layers, predictions)


def _garbage(rng: random.Random) -> str:
    return "".join(rng.choice("EtmL|()*,0123t||tt") for _ in range(rng.randint(0, 14)))


def _nearly_right(rng: random.Random) -> str:
    num_chunks = rng.choice([1, 2, 2, 4]) * rng.choice([1, 1, 2, 3])
    chunks = ["t" * rng.randint(0, 4) for _ in range(num_chunks)]
    chunks[0] = "E" + chunks[0]
    predictions = rng.choice([0, 0, 1, 1, 2])
    if predictions:
        at = rng.choice([num_chunks - 1, num_chunks - 1, max(num_chunks - 2, 0), rng.randrange(num_chunks)])
        if rng.random() < 0.7:
            chunks[at + 1 :] = [""] * (num_chunks - at - 1)
        chunks[at] += "m" * (predictions if rng.random() < 0.8 else 1)
        if predictions > 1 and rng.random() < 0.3:
            chunks[-1] += "m"
    chunks[-1] += "L"
    text = "|".join(chunks)
    for _ in range(rng.randint(0, 3)):
        text = _changed(text, rng)
    return text


def _changed(text: str, rng: random.Random) -> str:
    """The text with a repetition written short, a comma, or a mistake."""
    place, kind = rng.randrange(len(text) + 1), rng.random()
    if kind < 0.4:
        return re.sub(r"t{3,}", lambda run: f"t*{len(run[0])}", text, count=1)
    if kind < 0.6:
        return re.sub(r"(t+\|)\1+", lambda run: f"({run[1]})*{len(run[0]) // len(run[1])}", text, count=1)
    if kind < 0.8:
        return f"{text[:place]},{text[place:]}"
    if kind < 0.9:
        return f"{text[:place]}{rng.choice('EtmL|()*23x ')}{text[place:]}"
    return text[:place] + text[place + 1 :]


def _record(parser: Any, each: int = 40, seed: int = 25) -> None:
    """Write so many texts of each outcome with what Megatron says."""
    seen: Counter[str] = Counter()
    lines = []
    for number, asked in enumerate(random_cases(seed)):
        outcome = of_megatron(parser, asked)
        kind = outcome if isinstance(outcome, str) else "read"
        if seen[kind] < each * (4 if kind == "read" else 1):
            seen[kind] += 1
            lines.append(json.dumps([*asked, outcome]))
        if number > 200_000:
            break
    RECORDED.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    found_folder = megatron_folder()
    assert found_folder is not None, "megatron.core is not installed, and MEGATRON_CORE names no unpacked wheel"
    _record(megatron_parser(found_folder))
