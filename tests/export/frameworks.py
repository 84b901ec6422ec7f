"""The frameworks that exported jobs are for, where their wheels or sources are: unpacked, never installed.

``scripts/framework_wheels.py`` downloads the wheels without their dependencies, as ``scripts/check tests`` asks it to.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.export.stand_ins import framework

ARGUMENTS = Path(__file__).parent / "megatron_arguments.json"
"""Megatron-LM's arguments as its own parser has them, written by ``python -m tests.export.frameworks FOLDER``."""
CORE = tuple(
    f"megatron.core.{name}"
    for name in (
        "model_parallel_config", "transformer.transformer_config", "transformer.enums",
        "transformer.pipeline_parallel_layer_layout", "utils",
    )
)  # fmt: skip
TRAINING = tuple(
    f"megatron.training.{name}"
    for name in ("arguments", "argument_utils", "training_config", "resilience_config", "common_config")
)
NOT_HERE = ("torch", "transformer_engine", "triton", "nvidia_resiliency_ext", "apex", "tyro", "torchao", "torchft")
"""Packages that stand-ins take the place of."""


def wheel(name: str) -> Path:
    """The folder of an unpacked wheel, such as ``megatron_core-0.16.1``; the test is skipped, or fails, without.

    ``MOFA_FRAMEWORK_WHEELS`` names the folder of all wheels, which ``scripts/check`` sets: then one that is missing is
    a failure. By hand, without it, the tests are skipped and say why.
    """
    from scripts.framework_wheels import default_folder

    folder = default_folder()
    if (folder / name).is_dir():
        return folder / name
    why = f"{name} is not in {folder}: python scripts/framework_wheels.py downloads it"
    if "MOFA_FRAMEWORK_WHEELS" in os.environ:
        pytest.fail(why)
    pytest.skip(why)


@contextlib.contextmanager
def megatron_configs(folder: Path) -> Iterator[dict[str, Any]]:
    """Megatron-Core's configuration classes by name."""
    with framework(folder, CORE, NOT_HERE):
        yield vars(importlib.import_module("megatron.core.transformer.transformer_config"))


@contextlib.contextmanager
def torchtitan_configs(folder: Path) -> Iterator[dict[str, Any]]:
    """torchtitan 0.2.2's modules of configuration and of models' arguments, by their last names."""
    real = ["torchtitan", "torchtitan.config", "torchtitan.config.job_config", "torchtitan.config.manager",
            "torchtitan.models.moe.moe"]  # fmt: skip
    models = [f"torchtitan.models.{name}.model.args" for name in ("llama3", "qwen3", "deepseek_v3")]
    with framework(folder, (*real, *models), NOT_HERE):
        modules = {"job_config": "torchtitan.config.job_config", "moe": "torchtitan.models.moe.moe"}
        modules |= {name.split(".")[2]: name for name in models}
        yield {short: importlib.import_module(name) for short, name in modules.items()}


@contextlib.contextmanager
def torchtitan_python(folder: Path) -> Iterator[None]:
    """torchtitan 0.3.0's own modules, but for kernels and exchanges that register themselves with PyTorch."""
    left_out = {"experiments", "minimal_async_ep", "deepep", "flex_shard", "flux", "ops", "overrides"}
    files = [path.relative_to(folder) for path in (folder / "torchtitan").rglob("*.py")]
    real = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files
            if not left_out & set(file.parts)]  # fmt: skip
    with framework(folder, real, (*NOT_HERE, *TITAN_NEEDS)):
        yield


TITAN_NEEDS = ("torchdata", "datasets", "tokenizers", "safetensors", "tensorboard", "wandb", "einops", "PIL",
               "spmd_types", "torch_checkpointing", "transformers", "fsspec")  # fmt: skip
"""What torchtitan 0.3.0 imports beside PyTorch."""


def arguments_of(folder: Path) -> dict[str, Any]:
    """Megatron-LM's arguments by name, of a folder of its sources: how each is written, stored and its default."""
    with framework(folder, (*CORE, *TRAINING), NOT_HERE):
        configs = importlib.import_module("megatron.core.transformer.transformer_config")
        transformer = sys.modules["megatron.core.transformer"]

        for name in ("TransformerConfig", "MLATransformerConfig"):  # as the package itself would have them
            setattr(transformer, name, getattr(configs, name))
        arguments = importlib.import_module("megatron.training.arguments")
        parser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
        actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
        return {name.lstrip("-"): _described(action) for action in actions for name in action.option_strings}


@contextlib.contextmanager
def validated(folder: Path) -> Iterator[Any]:
    """A function that has Megatron-LM's arguments.py parse and validate arguments, and make the configuration."""
    with framework(folder, (*CORE, *TRAINING), NOT_HERE):
        configs = importlib.import_module("megatron.core.transformer.transformer_config")
        transformer = sys.modules["megatron.core.transformer"]
        for name in ("TransformerConfig", "MLATransformerConfig"):
            setattr(transformer, name, getattr(configs, name))
        module: Any = importlib.import_module("megatron.training.arguments")
        for name, stand_in in {
            "is_torch_min_version": lambda *_, **__: True, "is_te_min_version": lambda *_, **__: True,
            "get_device_arch_version": lambda: 9, "print_rank_0": lambda *_: None, "warn_rank_0": lambda *_: None,
            "_print_args": lambda *_: None, "update_use_dist_ckpt": lambda args: setattr(args, "use_dist_ckpt", True),
        }.items():  # fmt: skip
            setattr(module, name, stand_in)
        module.torch.cuda.get_device_capability = lambda *_: (9, 0)
        module.torch.is_grad_enabled = lambda: True

        def configured(words: list[str], num_gpus: int) -> Any:
            args = module.add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args(words)
            args.rank, args.world_size = 1, num_gpus
            module.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
            return args, module.core_transformer_config_from_args(args)

        yield configured


def _described(action: Any) -> dict[str, Any]:
    default = action.default
    if hasattr(default, "name"):
        default = default.name  # of an enum
    plain = isinstance(default, str | int | float | bool | list | None.__class__)
    choices = [getattr(choice, "name", choice) for choice in action.choices] if action.choices else None
    return {
        "action": type(action).__name__, "dest": action.dest, "default": default if plain else str(default),
        "type": getattr(action.type, "__name__", None), "nargs": action.nargs, "choices": choices,
    }  # fmt: skip


if __name__ == "__main__":
    from mofa.export.megatron import COMMIT

    recorded = {"commit": COMMIT, "arguments": dict(sorted(arguments_of(Path(sys.argv[1])).items()))}
    lines = ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in recorded["arguments"].items())
    ARGUMENTS.write_text(f'{{"commit": "{COMMIT}", "arguments": {{\n{lines}\n}}}}\n')
