"""torchtitan's settings of linears in fp8: written, taken by its own classes, and read back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import mofa
from mofa.errors import SpecError
from mofa.export.read_job import read_job
from mofa.export.torchtitan.float8_settings import RECIPES
from mofa.export.torchtitan.toml_files import torchtitan_job_files
from mofa.search.one_plan import plan_in_closed_form
from tests.export.frameworks import torchtitan_configs, wheel
from tests.export.jobs import assert_comes_back, job_of
from tests.export.random_plans import Drawn


def _drawn(gemm: str, **options: Any) -> Drawn:
    workload, cluster = mofa.load_workload("llama3-8b", global_batch=16), mofa.load_cluster("h100-hgx", 8)
    precision = workload.precision.model_copy(update={"gemm": gemm})
    workload = workload.model_copy(update={"precision": precision})
    framework = mofa.load_framework({"name": "torchtitan", "compile": True, **options})
    return Drawn(workload, cluster, framework, plan_in_closed_form(workload, cluster, {"recompute": "ops"}, framework))


@pytest.mark.parametrize("gemm", sorted(RECIPES))
def test_a_recipe_is_written_and_read_back(gemm: str, tmp_path: Path) -> None:
    """The converter and its settings, which torchtitan's own configuration has."""
    gathers = gemm == "fp8-tensorwise"
    filters = "output" if gemm == "fp8-rowwise-gw-hp" else "output+auto_filter_small_kn"
    drawn = _drawn(gemm, fp8_all_gather=gathers, fp8_scales_ahead=gathers, fp8_filter=filters)
    files = torchtitan_job_files(job_of(drawn, "torchtitan"))
    settings = tomllib.loads(files["torchtitan.toml"])
    assert settings["model"]["converters"] == ["quantize.linear.float8"]
    float8 = settings["quantize"]["linear"]["float8"]
    assert float8["filter_fqns"] == filters.split("+")
    assert float8.get("recipe_name") == RECIPES[gemm]
    assert bool(float8.get("enable_fsdp_float8_all_gather")) == gathers
    with torchtitan_configs(wheel("torchtitan-0.2.2")) as modules:
        own = modules["job_config"].JobConfig().quantize.linear.float8
        assert all(hasattr(own, name) for name in float8)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    back = read_job("torchtitan", tmp_path / "torchtitan.toml", 8)
    assert back.workload.precision.gemm == gemm
    assert back.framework.fp8_filter == filters and back.framework.fp8_all_gather == gathers
    assert_comes_back(back, drawn)


def test_kept_weights_come_back(tmp_path: Path) -> None:
    """``fsdp_reshard_after_forward: never`` in no pipeline."""
    drawn = _drawn("bf16", reshard_after_forward=False)
    files = torchtitan_job_files(job_of(drawn, "torchtitan"))
    assert tomllib.loads(files["torchtitan.toml"])["parallelism"]["fsdp_reshard_after_forward"] == "never"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert_comes_back(read_job("torchtitan", tmp_path / "torchtitan.toml", 8), drawn)


@pytest.mark.parametrize(
    ("kind", "more", "named"),
    [
        ("mx", "", "model.converters"),
        ("float8", 'recipe_name = "rowwise"\nenable_fsdp_float8_all_gather = true\n', "refuses both"),
        ("float8", 'recipe_name = "blockwise"\n', "blockwise"),
    ],
)
def test_what_is_not_modelled_of_fp8_is_refused_by_name(kind: str, more: str, named: str, tmp_path: Path) -> None:
    """Other converters, unknown recipes, and what torchtitan asserts against."""
    path = tmp_path / "job.toml"
    path.write_text(
        f'[model]\nname = "llama3"\nflavor = "8B"\nconverters = ["quantize.linear.{kind}"]\n[compile]\nenable = true\n'
        f"[quantize.linear.float8]\n{more}"
    )
    with pytest.raises(SpecError, match=named):
        read_job("torchtitan", path, 8)


def test_options_of_fp8_are_refused_in_bf16() -> None:
    """Options that would change nothing."""
    with pytest.raises(SpecError, match="change nothing"):
        torchtitan_job_files(job_of(_drawn("bf16", fp8_filter="attention+output"), "torchtitan"))
