"""One rank of a torchtitan run: its own Trainer on random tokens, unmodified.

torchtitan imports the ``datasets`` package for its text loader alone; an empty module takes its place, and the
TrainSpec gets a loader of random tokens instead.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.metadata
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch


def _without_datasets() -> None:
    for name, attributes in (
        ("datasets", ("Dataset", "load_dataset")),
        ("datasets.distributed", ("split_dataset_by_node",)),
    ):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for attribute in attributes:
            setattr(module, attribute, object)
        sys.modules[name] = module


_without_datasets()

import torchtitan.models.deepseek_v3  # noqa: E402
import torchtitan.models.llama3  # noqa: E402
import torchtitan.models.qwen3  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.moe import MoEArgs  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from mofa.measure.runners.common import BuiltTraining, Job, measure_one_rank  # noqa: E402

_MODULES = {
    "llama3": torchtitan.models.llama3,
    "qwen3": torchtitan.models.qwen3,
    "deepseek_v3": torchtitan.models.deepseek_v3,
}
_ARGS = {"llama3": "TransformerModelArgs", "qwen3": "Qwen3ModelArgs", "deepseek_v3": "DeepSeekV3ModelArgs"}


class RandomTokens(BaseDataLoader):  # type: ignore[misc]
    """Endless batches of random tokens, a few made once and given in turn."""

    def __init__(self, vocab: int, batch: int, seq_len: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._batches = [torch.randint(vocab, (batch, seq_len + 1), generator=generator) for _ in range(4)]

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        """Input and label, shifted by one."""
        while True:
            for tokens in self._batches:
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""


def _job_config(settings: dict[str, dict[str, Any]]) -> Any:
    config = JobConfig()
    for section, values in settings.items():
        _set(getattr(config, section), values, section)
    return config


def _set(part: Any, values: dict[str, Any], path: str) -> None:
    """Set what is given of a section, and of sections inside of it."""
    for name, value in values.items():
        if not hasattr(part, name):
            raise ValueError(f"torchtitan has no setting {path}.{name}")
        if isinstance(value, dict) and dataclasses.is_dataclass(getattr(part, name)):
            _set(getattr(part, name), value, f"{path}.{name}")
        else:
            setattr(part, name, value)


def _bias_routers(trainer: Any, bias: list[float] | None) -> None:
    if bias is None:
        return
    for layer in _moe_layers(trainer):
        shift = torch.tensor(bias, device=trainer.device)

        def shifted(module: Any, inputs: Any, output: Any, shift: Any = shift) -> Any:
            return output + shift.to(output.dtype)

        layer.router.gate.register_forward_hook(shifted)


def _moe_layers(trainer: Any) -> list[Any]:
    blocks = [b for part in trainer.model_parts for b in part.get_submodule("layers").values()]
    return [b.moe for b in blocks if getattr(b, "moe_enabled", False)]


def _counter(trainer: Any, step: Callable[[], None], tokens: int) -> Callable[[], list[list[int]]]:
    """Read the counts that torchtitan keeps for its own balancing, in one more step.

    Recomputation counts a token twice, so that the sum is brought back to the tokens of the step.
    """

    def count() -> list[list[int]]:
        layers = _moe_layers(trainer)
        for layer in layers:
            layer.tokens_per_expert.zero_()
        seen: list[Any] = []
        inner = trainer.optimizers.step

        def spy(*args: Any, **kwargs: Any) -> Any:
            seen.extend(layer.tokens_per_expert.clone() for layer in layers)
            return inner(*args, **kwargs)

        trainer.optimizers.step = spy
        step()
        del trainer.optimizers.step
        counts = [getattr(c, "full_tensor", lambda c=c: c)() for c in seen]
        return [[round(float(v) * tokens / max(float(c.sum()), 1.0)) for v in c.tolist()] for c in counts]

    return count


def build_torchtitan_training(job: Job) -> BuiltTraining:
    """The Trainer of one rank, with its own optimizer, schedule and clipping."""
    titan = job["torchtitan"]
    name = titan["model"]
    args = dict(titan["args"])
    if "moe_args" in args:
        args["moe_args"] = MoEArgs(**args["moe_args"])
    args_class = getattr(sys.modules[f"torchtitan.models.{name}.model.args"], _ARGS[name])

    def loader(*, dp_rank: int, job_config: Any, **_: Any) -> RandomTokens:
        training = job_config.training
        return RandomTokens(args["vocab_size"], training.local_batch_size, training.seq_len, job["seed"] + dp_rank)

    register_train_spec(
        "mofa",
        dataclasses.replace(
            get_train_spec(name),
            model_args={"run": args_class(**args)},
            build_dataloader_fn=loader,
            build_tokenizer_fn=None,
            build_validator_fn=None,
            state_dict_adapter=None,
        ),
    )
    settings = dict(titan["job"])
    settings["job"] = {"dump_folder": tempfile.mkdtemp()}
    settings["model"] = {**settings.get("model", {}), "name": "mofa", "flavor": "run"}
    settings["metrics"] = {"log_freq": 10**9}
    trainer = Trainer(_job_config(settings))
    _bias_routers(trainer, job.get("routing_bias"))
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.step = 1  # the first step logs, which resets the peaks
    first = True

    def step() -> None:
        nonlocal first
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)
        if first and torch.distributed.get_world_size() > 1:
            dist_utils.set_pg_timeouts(timedelta(seconds=100), trainer.parallel_dims)
        first = False

    has_experts = "moe_args" in args and bool(_moe_layers(trainer))
    params = [p for part in trainer.model_parts for p in part.parameters()]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in params]
    return BuiltTraining(
        step=step,
        count_tokens=_counter(trainer, step, job["routed_per_step"]) if has_experts else None,
        loss=lambda: None,
        facts={
            "local_params": sum(p.numel() for p in local),
            "param_dtypes": sorted({str(p.dtype) for p in local}),
            "layers": [list(part.get_submodule("layers").keys()) for part in trainer.model_parts],
        },
        chunks=tuple(trainer.model_parts),
        parts="mofa.measure.runners.torchtitan_parts",
    )


if __name__ == "__main__":
    os.environ.setdefault("TORCHELASTIC_ERROR_FILE", "")
    measure_one_rank(build_torchtitan_training, importlib.metadata.version("torchtitan"))
