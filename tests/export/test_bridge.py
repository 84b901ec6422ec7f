"""Recipes of Megatron-Bridge: each field exists in its class, by the classes' own source, and takes the value."""

from __future__ import annotations

import ast
from functools import cache
from itertools import islice
from typing import Any

import pytest

from mofa.errors import SpecError
from mofa.export.bridge.config_fields import ELSEWHERE, SAID_OTHERWISE, SWITCHES, bridge_config_fields
from mofa.export.bridge.recipe import bridge_job_files
from mofa.export.megatron.megatron_table import MEGATRON
from tests.export.frameworks import wheel
from tests.export.jobs import job_of
from tests.export.random_plans import Drawn, drawn_plans
from tests.export.test_megatron import OPTIONS, STRATEGIES, WORKLOADS

BRIDGE = ("training/config.py", "training/mixed_precision.py", "training/tokenizers/config.py",
          "models/gpt_provider.py", "models/mla_provider.py", "models/transformer_config.py")  # fmt: skip
CORE = ("transformer/transformer_config.py", "model_parallel_config.py", "optimizer/optimizer_config.py",
        "distributed/distributed_data_parallel_config.py", "datasets/gpt_dataset.py",
        "datasets/blended_megatron_dataset_config.py")  # fmt: skip
NUMBER = 50


@pytest.fixture(scope="module")
def plans() -> list[Drawn]:
    """Fifty random plans that Bridge takes."""
    drawn = drawn_plans("megatron", WORKLOADS, OPTIONS, STRATEGIES, seed=31)
    return list(islice((plan for plan in drawn if plan.workload.model.positions == "rope"), NUMBER))


@cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    """Classes of Bridge and of Megatron-Core by name; some names are in both."""
    bridge = wheel("megatron_bridge-0.3.1") / "megatron" / "bridge"
    core = wheel("megatron_core-0.16.1") / "megatron" / "core"
    out: dict[str, list[ast.ClassDef]] = {}
    for file in [*(bridge / name for name in BRIDGE), *(core / name for name in CORE)]:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                out.setdefault(node.name, []).append(node)
    return out


def fields_of_class(name: str) -> dict[str, str]:
    """Fields of a class and of those that it inherits, with their annotations; parameters of its own __init__ too."""
    out: dict[str, str] = {}
    for node in _classes().get(name.removeprefix("MCore"), []):
        for base in node.bases:
            inherited = ast.unparse(base).split(".")[-1].split("[")[0]
            if inherited.removeprefix("MCore") != node.name:
                out |= fields_of_class(inherited)
        for entry in node.body:
            if isinstance(entry, ast.AnnAssign):
                out[ast.unparse(entry.target)] = ast.unparse(entry.annotation)
            elif isinstance(entry, ast.FunctionDef) and entry.name == "__init__":
                out |= {arg.arg: ast.unparse(arg.annotation) for arg in entry.args.args if arg.annotation is not None}
    return out


def _takes(annotation: str, value: Any) -> bool:
    """Whether an annotation takes a literal value, as far as it says plain types and choices."""
    if value is None:
        return "Optional" in annotation or "None" in annotation
    if "Literal" in annotation and isinstance(value, str):
        return repr(value) in annotation
    kinds = {bool: ("bool",), int: ("int", "float"), float: ("float",), str: ("str",), list: ("List", "list"),
             tuple: ("Tuple", "tuple")}[type(value)]  # fmt: skip
    return any(kind in annotation for kind in kinds)


def test_every_field_is_one_of_bridges_and_takes_its_value(plans: list[Drawn]) -> None:
    seen = set()
    for drawn in plans:
        tree = ast.parse(bridge_job_files(job_of(drawn, "megatron-bridge"))["mofa_recipe.py"])
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords]:
            name = ast.unparse(call.func)
            fields = fields_of_class(name)
            assert fields, name
            for keyword in call.keywords:
                assert keyword.arg in fields, (name, keyword.arg)
                seen.add((name, keyword.arg))
                try:
                    value = ast.literal_eval(keyword.value)
                except ValueError:
                    continue  # a call of another class, or a name of torch's
                if (keyword.arg, value) == ("q_lora_rank", None):
                    continue  # annotated int; Megatron-Core asks whether it is None (multi_latent_attention.py)
                assert _takes(fields[keyword.arg], value), (name, keyword.arg, value, fields[keyword.arg])
    assert len(seen) > 90


def test_every_argument_of_megatron_has_a_field() -> None:
    """What Megatron-LM's arguments say of a plan, Bridge's fields say too: none is forgotten."""
    model = fields_of_class("GPTModelProvider") | fields_of_class("MLAModelProvider")
    written = {argument.name for row in MEGATRON.rows for argument in row.arguments}
    written |= {given.argument.name for given in MEGATRON.assumed}
    for name in written:
        if not name.startswith("$") and name not in (*ELSEWHERE, *SAID_OTHERWISE, *READ_ALONE):
            assert MEGATRON.argument_named(name).dump_name in model, name
    assert set(SWITCHES) <= written and set(ELSEWHERE) <= written and set(SAID_OTHERWISE) <= written


READ_ALONE = ("num-layers-per-virtual-pipeline-stage", "decoder-first-pipeline-num-layers", "recompute-activations",
              "decoder-last-pipeline-num-layers", "use-rotary-position-embeddings")  # fmt: skip
"""Arguments that a job may have and no export writes."""


def test_fields_say_what_the_arguments_say(plans: list[Drawn]) -> None:
    for drawn in plans:
        job = job_of(drawn, "megatron-bridge")
        fields, s = bridge_config_fields(job, MEGATRON.write_arguments(job)), drawn.plan.strategy
        assert fields["model.tensor_model_parallel_size"] == s.tp
        assert fields["model.context_parallel_size"] == s.cp
        assert fields["train.micro_batch_size"] == s.micro_batch
        assert fields.get("model.virtual_pipeline_model_parallel_size", 1) == s.vpp
        assert fields["ddp.use_distributed_optimizer"] == (s.zero == 1)
        assert fields["model.sequence_parallel"] == s.sp
        assert fields.get("mixed_precision.fp8_recipe", "") == drawn.workload.precision.fp8_recipe


def test_positions_that_bridge_cannot_learn_are_refused() -> None:
    drawn = next(drawn_plans("megatron", ["gpt3-175b"], OPTIONS, STRATEGIES, seed=1))
    model = drawn.workload.model.model_copy(update={"max_positions": 4096})
    longer = drawn._replace(workload=drawn.workload.model_copy(update={"model": model}))
    with pytest.raises(SpecError, match="max_positions"):
        bridge_job_files(job_of(longer, "megatron-bridge"))


def test_the_recipe_is_python(plans: list[Drawn]) -> None:
    for drawn in plans[:5]:
        compile(bridge_job_files(job_of(drawn, "megatron-bridge"))["mofa_recipe.py"], "mofa_recipe.py", "exec")
