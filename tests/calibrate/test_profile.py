"""From the committed measurements to accuracy, profile and back; nccl-tests into a profile."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.check import TARGETS, check, predictions
from mofa.calibrate.measurements import append_row
from mofa.calibrate.nccl_tests import import_nccl, read_nccl
from mofa.calibrate.profile import fit
from mofa.errors import SpecError
from mofa.specs.hardware import GpuSpec, NodeSpec

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "measurements" / name for name in ("h200-1gpu", "h200-2gpu", "h200-4gpu")]
RANKS = "\n".join(
    f"#  Rank  {i} Group  0 Pid  {i} on  node{i // 8} device  {i % 8} [0000:0f:00] NVIDIA H200" for i in range(8)
)
TEXT = f"""# nThread 1 nGpus 8 minBytes 8 maxBytes 8589934592
# Collective test starting: all_reduce_perf
{RANKS}
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
     1048576        262144     float     sum      -1    32.42   32.34   56.60      0    32.10   32.67   57.17      0
  8589934592    2147483648     float     sum      -1  31400.0  273.57  478.74      0  31410.0  273.48  478.59      0
# Avg bus bandwidth    : 267
"""


@pytest.fixture(scope="module")
def checked() -> dict:
    return check(FOLDERS, by_op=True)


@pytest.mark.parametrize("family", sorted(TARGETS))
def test_held_out_shapes_are_predicted_within_the_targets(checked: dict, family: str) -> None:
    found = checked["families"][family]
    median, p90 = TARGETS[family]
    assert found["points"] >= (100 if family == "gemm" else 60)
    assert found["median_abs_error"] <= median
    assert found["p90_abs_error"] <= p90
    assert abs(found["bias"]) <= 0.03


def test_check_is_json_and_names_each_op(checked: dict) -> None:
    assert json.loads(json.dumps(checked)) == checked
    assert "attention cudnn bwd" in checked["ops"]


def test_predictions_hold_every_family_and_both_splits() -> None:
    found = predictions(FOLDERS[1:])
    assert {row["split"] for row in found} == {"grid", "heldout"}
    assert all(row["predicted_s"] > 0 for row in found)


def test_documented_table_is_the_computed_one(checked: dict) -> None:
    text = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(): cells for line in text.splitlines() if len(cells := line.split("|")) == 8}
    for name, found in checked["families"].items():
        points, *errors = rows[name][2:6]
        assert int(points) == found["points"]
        for error, key in zip(errors, ("median_abs_error", "p90_abs_error", "bias"), strict=True):
            assert float(error.strip(" %")) / 100 == pytest.approx(
                found[key], abs=0.004
            )  # SciPy's versions differ a little


def test_profile_is_valid_and_says_where_numbers_come_from(tmp_path: Path) -> None:
    written = fit(FOLDERS, "mine", tmp_path)
    gpu = GpuSpec.model_validate(yaml.safe_load(written["gpus"].read_text()))
    node = NodeSpec.model_validate(yaml.safe_load(written["nodes"].read_text()))
    curves = yaml.safe_load(written["curves"].read_text())
    assert gpu.name == node.gpu == "mine"
    gemm = gpu.curves.gemm["bf16"]
    assert gemm.provenance == "measured" and "h200-1gpu" in gemm.source
    assert 0.8 < max(rate for _, _, rate in gemm.form.tiles) / gpu.peak_flops_per_s["bf16"].value < 0.9
    assert 0.8 < gemm.alone < gemm.sustained < 0.95
    assert gemm.median_abs_error is not None and gemm.median_abs_error < 0.05
    assert node.collectives["all_gather 4"].form.group == 4
    assert 0.6 < node.intra.efficiency.value < 0.85
    assert curves["gemm"]["bf16"]["ranges"]["m"][1] > 1e5
    assert 0.8 < curves["sustained"]["gemm bf16 alone"] < 0.95


def test_profile_of_one_gpu_keeps_the_bundled_links(tmp_path: Path) -> None:
    node = yaml.safe_load(fit(FOLDERS[0], "one", tmp_path)["nodes"].read_text())
    assert (
        node["intra"]["efficiency"]
        == yaml.safe_load((ROOT / "hardware_profiles/nodes/h200-hgx.yaml").read_text())["intra"]["efficiency"]
    )


def test_folders_of_different_gpus(tmp_path: Path) -> None:
    append_row(
        tmp_path,
        Case("gemm", "fwd", "x", "bf16", "grid", {"m": 64, "n": 64, "k": 64}),
        Sample(1e-5, 1e-5, 1e-5, 7),
        "NVIDIA A100",
        "h",
    )
    (tmp_path / "environment.json").write_text('{"gpu": "NVIDIA A100", "num_sms": 108}')
    with pytest.raises(SpecError, match="NVIDIA A100"):
        fit([FOLDERS[0], tmp_path], "x", tmp_path)
    with pytest.raises(SpecError, match=r"no gemm rows|no held-out rows"):
        check([tmp_path])


def test_environment_of_another_gpu(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS[1], tmp_path / "m")
    environment = tmp_path / "m" / "environment.json"
    environment.write_text(environment.read_text().replace("NVIDIA H200", "NVIDIA H100"))
    with pytest.raises(SpecError, match=r"environment.json is of 'NVIDIA H100'"):
        check([tmp_path / "m"])


def profile(tmp_path: Path) -> Path:
    return Path(shutil.copy(ROOT / "hardware_profiles/nodes/h200-hgx.yaml", tmp_path / "h200-hgx.yaml"))


def test_nccl_text_changes_the_link(tmp_path: Path) -> None:
    file = tmp_path / "out.txt"
    file.write_text(TEXT)
    run = read_nccl(file)
    assert (run.op, run.group, run.hosts, run.gpu) == ("all_reduce", 8, 1, "NVIDIA H200")
    assert run.bus_bytes_per_s == pytest.approx(478.7e9, rel=1e-3)  # the tool's own busbw column
    path = profile(tmp_path)
    assert import_nccl(file, path)["level"] == "intra"
    node = NodeSpec.model_validate(yaml.safe_load(path.read_text()))
    assert node.intra.efficiency.value == pytest.approx(478.7 / 450, rel=1e-3)
    assert node.intra.efficiency.provenance == "measured"


def test_nccl_json(tmp_path: Path) -> None:
    file = tmp_path / "alltoall_perf.json"
    devices = [{"hostname": f"n{i // 8}", "device_name": "NVIDIA H200"} for i in range(16)]
    file.write_text(json.dumps({"devices": devices, "results": [{"size": 2**30, "out_of_place": {"time": 25000.0}}]}))
    found = import_nccl(file, profile(tmp_path))
    assert (found["level"], found["field"]) == ("nic", "all_to_all_efficiency")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT.replace("NVIDIA H200", "NVIDIA H100 80GB HBM3"), "measured on 'NVIDIA H100"),
        (TEXT.replace("31400.0", "nan"), "no positive number"),
        (TEXT.replace("31400.0", "--"), "no time in column 6"),
        (TEXT.replace("all_reduce_perf", "perf"), "which collective"),
        ("hello all_reduce_perf\n", "no rows"),
        ("{", "not the JSON"),
        (TEXT.replace(RANKS, ""), "0 rank"),
        (TEXT.replace("31400.0", "3.14"), "right profile"),
    ],
)
def test_nccl_errors_leave_the_profile(tmp_path: Path, text: str, words: str) -> None:
    file, path = tmp_path / "out.txt", profile(tmp_path)
    file.write_text(text)
    before = path.read_text()
    with pytest.raises(SpecError, match=words):
        import_nccl(file, path)
    assert path.read_text() == before


def test_bundled_profile_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out.txt").write_text(TEXT)
    with pytest.raises(SpecError, match="bundled profile is not changed"):
        import_nccl(Path("out.txt"), "h200-hgx")
