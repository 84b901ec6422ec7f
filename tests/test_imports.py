"""Modules import one another in no circle, imports inside functions and those for types counted."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter

from tests.committed import ROOT, nodes_of

ONE_SUBJECT = {
    "activation_offload",
    "attribute", "balance", "calibrate", "chunked_layer", "chunks", "collectives", "combined_passes",
    "data_parallel", "deferred_weight_gradients", "dispatcher_retention", "estimate", "expert_overlap",
    "export", "faults", "float8", "fp8", "fsdp1", "goodput", "goodput_by_scale", "hopper", "host_optimizer",
    "layer_segments", "linear",
    "long_run", "loss", "measure", "megatron", "memory", "moe", "multi_stream", "paired_passes", "plan", "record",
    "report", "routing", "schema", "scored_runs", "sequential_experts", "serve", "step", "step_band", "te_fp8",
    "torchtitan", "validate",
}  # fmt: skip
"""Names that several modules have because they treat one subject at several levels, such as closed form and replay."""


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports anywhere, by their names behind ``mofa.``."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "mofa").rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        wanted = found.setdefault(name.removeprefix("mofa."), set())
        for node in nodes_of(path.relative_to(ROOT).as_posix()):
            if isinstance(node, ast.ImportFrom) and node.module:
                of = (f"{node.module}.{one.name}" for one in node.names)
                named = [one if one in paths else node.module for one in of]
            elif isinstance(node, ast.Import):
                named = [one.name for one in node.names]
            else:
                continue
            wanted |= {one.removeprefix("mofa.") for one in named if one in paths and one != name}
    return found


def test_no_module_is_in_a_circle() -> None:
    TopologicalSorter(imports()).prepare()


def test_two_modules_of_one_name_are_one_subject() -> None:
    """A name says one thing, wherever it stands."""
    counted = Counter(name.rpartition(".")[2] for name in imports() if not name.endswith("__main__"))
    assert {name for name, count in counted.items() if count > 1} == ONE_SUBJECT
