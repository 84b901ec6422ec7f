"""``mofa calibrate host``: what was timed becomes a host's profile, the rest goes by it; without a GPU it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mofa.calibrate.fits.fitted_curves import DeviceCurveFits
from mofa.calibrate.host_profile import host_profile_mapping, host_profile_yaml, processor_name
from mofa.specs.host import SmallLayerTime
from mofa.specs.host_profiles import load_host_profile
from mofa.specs.load import load_cluster
from tests.cli.conftest import Cli, one_line_of
from tests.cli.conftest import cli as cli

TIMED = {"eager_add": 8e-6, "eager_silu": 9e-6, "eager_rmsnorm": 10e-6, "eager_linear_grad": 20e-6, "sync": 30e-6}


def curves(gpu: str = "NVIDIA L40S") -> DeviceCurveFits:
    return DeviceCurveFits(gpu=gpu, num_sms=142, host_s=TIMED)


def test_what_is_not_timed_goes_by_a_small_op(tmp_path: Path) -> None:
    path = tmp_path / "host.yaml"
    path.write_text(host_profile_yaml(host_profile_mapping(curves(), "a processor")), encoding="utf-8")
    host, typical = load_host_profile(path), load_cluster("l40s-pcie", 1).gpu.curves.host
    factor = 9e-6 / typical.eager_op_s.value
    assert host.cpu == "a processor" and host.eager_op_s.value == pytest.approx(9e-6)
    assert host.sync_s.value == pytest.approx(30e-6) and host.sync_s.provenance == "measured"
    assert host.item_s.value == pytest.approx(typical.item_s.value * factor, rel=1e-3)
    assert host.item_s.provenance == "transferred"
    linear, before = (of.modules["linear"].forward_s.value for of in (host, typical))
    assert linear == pytest.approx(before * factor, rel=1e-3)


def test_modules_go_by_a_layer_where_one_was_timed(tmp_path: Path) -> None:
    typical = load_cluster("l40s-pcie", 1).gpu.curves.host
    assert typical.layer_issue_s is not None and typical.layer_back_s is not None
    layer = SmallLayerTime(2 * typical.layer_issue_s.value, 3 * typical.layer_back_s.value)
    path = tmp_path / "host.yaml"
    path.write_text(
        host_profile_yaml(host_profile_mapping(curves("some new GPU"), "a processor", layer)), encoding="utf-8"
    )
    host = load_host_profile(path)
    linear, before = host.modules["linear"], typical.modules["linear"]
    assert linear.forward_s.value == pytest.approx(2 * before.forward_s.value, rel=1e-3)
    assert linear.backward_s is not None and before.backward_s is not None
    assert linear.backward_s.value == pytest.approx(3 * before.backward_s.value, rel=1e-3)
    assert host.layer_issue_s is not None and host.layer_issue_s.value == pytest.approx(layer.issue_s, rel=1e-3)


def test_plans_take_it(cli: Cli, tmp_path: Path) -> None:
    steps = []
    for factor in (1.0, 10.0):
        path = tmp_path / f"host-{factor:g}.yaml"
        slow = DeviceCurveFits(gpu="NVIDIA L40S", num_sms=142, host_s={op: factor * s for op, s in TIMED.items()})
        path.write_text(host_profile_yaml(host_profile_mapping(slow, "a processor")), encoding="utf-8")
        job = ("llama3-8b", "h100-hgx", "--gpus", "8", "--strategy", "tp=2", "--framework", "torchtitan")
        done = cli("estimate", *job, "--no-replay", "--json", "--host", str(path))
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)
        assert plan["band"]["hosts_s"] is None
        steps.append(plan["step_s"])
    assert steps[1] > 1.05 * steps[0]
    done = cli("estimate", *job, "--host", str(path), "--host-issue", "6us")
    assert done.returncode == 2 and "--host: --host-issue sets the host too; keep one" in one_line_of(done.stderr)


def test_a_machine_without_a_gpu_is_told_what_is_needed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = cli("calibrate", "host", "--out", "host.yaml")
    assert done.returncode == 2 and not Path("host.yaml").exists()
    assert "one GPU of any kind is needed" in one_line_of(done.stderr)


def test_the_processor_says_its_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: AMD EPYC 9575F 64-Core Processor\n")
    assert processor_name(info) == "AMD EPYC 9575F 64-Core Processor"
    assert processor_name(tmp_path / "none") == "unknown processor"
