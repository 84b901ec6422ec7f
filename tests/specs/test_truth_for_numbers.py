"""True and false where a number is asked for are refused, wherever they stand, and taken where they are asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mofa.errors import SpecError
from mofa.export.entry import load_numbered_result
from mofa.specs.load import load_cluster, load_framework, load_workload
from mofa.specs.sweep_lists import load_sweep
from tests.committed import read_yaml, yaml_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("gpu.num_sms", "gpu.num_sms.value (True) must be a number; correct it"),
        ("gpu.curves.stream_clock", "gpu.curves.stream_clock.value (True) must be a number"),
        ("gpu.curves.gemm.bf16.form.floor_s", "gpu.curves.gemm.bf16.form.floor_s (True) must be a number"),
        ("gpu.curves.gemm.bf16.sustained", "gpu.curves.gemm.bf16.sustained (True) must be a number"),
        ("node.gpus_per_domain", "node.gpus_per_domain (True) must be a whole number"),
    ],
)
def test_of_hardware(path: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        load_cluster("h100-hgx", 8, {path: True})
    assert words in str(error.value)


def test_within_lists(tmp_path: Path) -> None:
    gpu = read_yaml(ROOT / "hardware_profiles/gpus/h100-sxm.yaml")
    gpu["curves"]["gemm"]["bf16"]["form"].update(tiles=[[128, True, 8e14]])
    for kind, facts in (("gpus/h100-sxm", gpu), ("nodes/n", read_yaml(ROOT / "hardware_profiles/nodes/h100-hgx.yaml"))):
        (tmp_path / kind).parent.mkdir()
        (tmp_path / f"{kind}.yaml").write_text(yaml_text(facts))
    with pytest.raises(SpecError, match=r"gemm\.bf16\.form\.tiles\[0\]\[1\] \(True\) must be a whole number"):
        load_cluster(tmp_path / "nodes/n.yaml", 8)
    for prices in ([True], [{"h100-hgx": True}]):
        with pytest.raises(SpecError, match=r"prices\[0\].* \(True\) must be a number"):
            load_sweep({"models": "llama3-8b", "clusters": "h100-hgx", "gpus": 8, "prices": prices})


def test_of_frameworks_and_workloads() -> None:
    with pytest.raises(SpecError, match=r"clipped_steps \(True\) must be a number"):
        load_framework("megatron", {"clipped_steps": True})
    with pytest.raises(SpecError, match=r"loss_metrics \(False\) must be a whole number"):
        load_framework("fsdp1", {"loss_metrics": False})
    with pytest.raises(SpecError, match=r"model\.num_layers \(True\)"):
        load_workload("llama3-8b", overrides={"model.num_layers": True})


def test_where_they_are_asked_for() -> None:
    assert load_framework("torchtitan", {"compile": True}).compile
    assert load_framework("fsdp1", {"cross_entropy_fusion": True}).cross_entropy_fusion == "native"
    assert load_cluster("h100-hgx", 8, {"node.nic.rail_optimised": True}).node.nic.rail_optimised


def test_of_saved_results(tmp_path: Path) -> None:
    from tests.fuzz.readers import _plan

    plan = _plan()
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    load_numbered_result(tmp_path / "plan.json", None)
    plan["days_without_failures"] = True
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(SpecError, match=r"days_without_failures: .*number"):
        load_numbered_result(tmp_path / "plan.json", None)
