"""From the committed measurements to accuracy, profile and back; nccl-tests into a profile."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mofa.calibrate.cases import Case, Sample
from mofa.calibrate.check import TARGETS, check, predictions
from mofa.calibrate.measurements import append_row
from mofa.calibrate.nccl_tests import import_nccl, read_nccl
from mofa.calibrate.profile import fit
from mofa.cost.collectives import collective_s
from mofa.cost.topology import Group
from mofa.errors import SpecError
from mofa.specs.hardware import GpuSpec, NodeSpec
from mofa.specs.load import load_cluster

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "measurements" / name for name in ("h200-1gpu", "h200-2gpu", "h200-4gpu")]
RANKS = "\n".join(
    f"#  Rank  {i} Group  0 Pid  {i} on  node{i // 8} device  {i % 8} [0000:0f:00] NVIDIA H200" for i in range(8)
)
SIZES = [2**k for k in range(12, 33)]
LINE = "  {size} {count} float sum -1 {time:.1f} 0.1 0.2 0 {time:.1f} 0.1 0.2 0"
ROWS = "\n".join(  # 30 us and 478.7 GB/s on the bus, as of 8 H200 with in-switch reduction
    [LINE.format(size=size, count=size // 4, time=30 + size * 1.75 / 478.7e3) for size in SIZES[:-1]]
    + ["  8589934592 2147483648 float sum -1 31400.0 273.57 478.74 0 31410.0 273.48 478.59 0"]
)
TEXT = f"""# nThread 1 nGpus 8 minBytes 8 maxBytes 8589934592
# Collective test starting: all_reduce_perf
{RANKS}
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
{ROWS}
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
    found = import_nccl(file, path)
    assert (found["level"], found["curve"]) == ("intra", "all_reduce 8")
    node = NodeSpec.model_validate(yaml.safe_load(path.read_text()))
    # what in-switch reduction adds is another fact of the node
    assert node.intra.efficiency.value * node.nvls_factor.value == pytest.approx(478.7 / 450, rel=2e-3)
    assert node.intra.efficiency.provenance == "measured"


def planned_s(path: Path, op: Any, size: float, group: int, hosts: int = 1) -> float:
    """Time of a collective as the planner sees it."""
    each = np.array([group // hosts])
    place = Group(np.array([group]), each, each)
    return float(collective_s(op, np.array([size]), place, load_cluster(path, 8 * hosts))[0])


@pytest.mark.parametrize("size", [2**16, 2**24, 2**32])
def test_the_planner_gives_the_times_that_nccl_tests_measured(tmp_path: Path, size: int) -> None:
    file, path = tmp_path / "out.txt", profile(tmp_path)
    file.write_text(TEXT)
    import_nccl(file, path)
    assert planned_s(path, "all_reduce", size, 8) == pytest.approx(30e-6 + size * 1.75 / 478.7e9, rel=0.03)


@pytest.mark.parametrize(
    ("program", "op", "time_us"), [("alltoall", "all_to_all", 25000.0), ("all_reduce", "all_reduce", 5500.0)]
)
def test_nccl_json_of_two_hosts_is_the_network(tmp_path: Path, program: str, op: str, time_us: float) -> None:
    """8 NICs of 50 GB/s: rings of two hosts carry the traffic of all eight GPUs of a node, an all-to-all half of it."""
    file, path = tmp_path / f"{program}_perf.json", profile(tmp_path)
    devices = [{"hostname": f"n{i // 8}", "device_name": "NVIDIA H200"} for i in range(16)]
    file.write_text(json.dumps({"devices": devices, "results": [{"size": 2**30, "out_of_place": {"time": time_us}}]}))
    found = import_nccl(file, path)
    assert (found["level"], found["curve"]) == ("nic", None)
    assert found["field"] == ("all_to_all_efficiency" if op == "all_to_all" else "efficiency")
    assert 0.3 < found["value"] < 1.0
    assert planned_s(path, op, 2**30, 16, hosts=2) == pytest.approx(time_us / 1e6, rel=1e-3)


def test_nccl_into_a_profile_whose_name_says_no_gpu(tmp_path: Path) -> None:
    fit(FOLDERS, "my-node", tmp_path)
    (tmp_path / "out.txt").write_text(TEXT)
    path = tmp_path / "nodes" / "my-node.yaml"
    assert import_nccl(tmp_path / "out.txt", path)["curve"] == "all_reduce 8"
    (tmp_path / "out.txt").write_text(TEXT.replace("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    with pytest.raises(SpecError, match="is of the GPU H200"):
        import_nccl(tmp_path / "out.txt", path)


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
        (TEXT.replace("\n".join(ROWS.splitlines()[:17]) + "\n", ""), "one more needs 5; run nccl-tests with -b 4K"),
        (TEXT.replace("node0 device  6", "node1 device  6").replace("node0 device  7", "node2 device  7"), "on 3 host"),
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
