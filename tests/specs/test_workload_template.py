"""Workloads to fill in from a config.json whose class is read: every fact of the model, by the class's own keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mofa.errors import SpecError
from mofa.specs.huggingface.keys import model_of_config_class, read_keys
from mofa.specs.load import load_workload
from mofa.specs.workload_template import bundled_workload_like, workload_template

CONFIGS = Path(__file__).parent / "configs"
PUBLIC = ["Qwen--Qwen1.5-MoE-A2.7B", "openai-community--gpt2", "google--gemma-2-9b", "nvidia--DeepSeek-V3.1-NVFP4",
          "CohereLabs--c4ai-command-r-plus", "EleutherAI--gpt-neox-20b", "bigcode--starcoder"]  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_template_of_a_class_that_is_read_holds_its_whole_model(name: str, tmp_path: Path) -> None:
    config = CONFIGS / f"{name}.json"
    keys, title = read_keys(config)
    model = model_of_config_class(config)
    assert model is not None
    text = workload_template(bundled_workload_like(model), keys, title, model)
    file = tmp_path / "mine.yaml"
    for field, value in (("seq_len", "2048"), ("global_batch", "64"), ("tokens", "1T")):
        text = text.replace(f"{field}: ???", f"{field}: {value}")
    file.write_text(text)
    anonymous = {"name": "x", "source": "none"}
    assert load_workload(file).model.model_copy(update=anonymous) == model.model_copy(update=anonymous)


def test_a_workload_of_other_kinds_is_no_start(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "deepseek_v3"}))
    model = model_of_config_class(file)
    assert model is not None
    with pytest.raises(SpecError, match="has gqa attention, the file's class mla; use deepseek-v3"):
        workload_template("llama3-8b", {}, "x", model)
    file.write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(SpecError, match="has no experts, the file's class has; use qwen3-30b-a3b"):
        workload_template("llama3-8b", {}, "x", model_of_config_class(file))


def test_classes_without_a_step_or_unknown_have_no_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for model_type in ("qwen3_next", "nobody"):
        file.write_text(json.dumps({"model_type": model_type}))
        assert model_of_config_class(file) is None
