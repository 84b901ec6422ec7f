"""``mofa calibrate`` as a user runs it, on the committed measurements and on the CPU: no GPU, no torch."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mofa.calibrate import measurements
from mofa.cli.main import main
from mofa.specs.load import load_cluster
from tests.calibrate.test_profile import TEXT
from tests.cli.conftest import Cli, one_line_of

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
FOLDERS = [str(ROOT / "measurements" / name) for name in ("h200-1gpu", "h200-2gpu", "h200-4gpu")]
CPU_RUN = ["calibrate", "run", "--quick", "--device", "cpu", "--families", "gemm,copy"]
pytestmark = pytest.mark.usefixtures("committed_folders_fitted_once")


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NumPy times is of two megabytes at most: these tests ask how cases are kept, not how long they take."""
    monkeypatch.setattr("mofa.calibrate.bench.numpy_bench.MAX_ELEMENTS", 2**19)


@pytest.fixture(scope="module")
def cpu_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``--device cpu`` measures."""
    folder = tmp_path_factory.mktemp("cpu")
    assert main([*CPU_RUN, "--out", str(folder)]) == 0
    return folder


def test_run_says_what_it_measured_and_resumes(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "new" / "cpu"
    assert main([*CPU_RUN, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "0 there before" in printed.out and printed.err == ""
    rows = measurements.read_rows(out)
    before = {path.name: path.read_bytes() for path in out.glob("*.csv")}
    assert main([*CPU_RUN, "--out", str(out)]) == 0
    assert f"0 measured, {len(rows)} there before" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in out.glob("*.csv")} == before


def test_an_interrupted_run_keeps_whole_rows_and_goes_on(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = measurements.append_row, 0

    def interrupted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        real(*args)
        if calls == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mofa.calibrate.run_cases.append_row", interrupted)
        assert main([*CPU_RUN, "--out", str(tmp_path)]) == 130
    assert one_line_of(capsys.readouterr().err) == "mofa: interrupted; no file is half-written"
    assert len(measurements.read_rows(tmp_path)) == 5
    assert main([*CPU_RUN, "--out", str(tmp_path)]) == 0
    assert "5 there before" in capsys.readouterr().out
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_run_on_the_cpu_needs_nothing_but_numpy(process: Cli) -> None:
    done = process(*CPU_RUN, "--out", "m")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--families", "gem"], "unknown gem"),
        (["--quick", "--full"], "exclude each other"),
        (["--device", "tpu"], "--device: tpu is unknown; use one of auto, cuda, cpu"),
    ],
)
def test_wrong_options_of_run(tmp_path: Path, capsys: Captured, options: list[str], says: str) -> None:
    assert main(["calibrate", "run", "--out", str(tmp_path / "m"), *options]) == 2
    assert says in one_line_of(capsys.readouterr().err)
    assert not (tmp_path / "m").exists()


def test_run_without_torch_is_one_line(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["calibrate", "run", "--out", str(tmp_path / "m")]) == 2
    assert "torch is not installed; pip install 'mofa[gpu]'" in one_line_of(capsys.readouterr().err)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_run_without_a_gpu_is_one_line(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    import types

    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert main(["calibrate", "run", "--device", device, "--out", str(tmp_path / "m")]) == 2
    assert "no CUDA device found" in one_line_of(capsys.readouterr().err)


def test_the_folder_that_is_a_file_is_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "m").write_text("")
    assert main([*CPU_RUN, "--out", str(tmp_path / "m")]) == 2
    assert "is a file, not a directory" in one_line_of(capsys.readouterr().err)


def test_fit_writes_a_profile_that_plan_uses(tmp_path: Path, capsys: Captured) -> None:
    assert main(["calibrate", "fit", *FOLDERS, "--name", "my-node", "--out", str(tmp_path / "profiles")]) == 0
    out, err = capsys.readouterr()
    node = tmp_path / "profiles" / "nodes" / "my-node.yaml"
    assert (tmp_path / "profiles" / "gpus" / "my-node.yaml").is_file()
    assert f"wrote {node}" in out and err == ""
    cluster = load_cluster(str(node), 8)
    assert cluster.gpu.name == "my-node"
    assert cluster.node.intra.efficiency.provenance == "measured"
    assert main(["estimate", "llama3-8b", str(node), "--gpus", "4", "--strategy", "tp=4 micro_batch=1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    grounds, stragglers = said["provenance"], said["time"]["exposed"]["stragglers"] / said["step_s"]
    own = grounds.get("measured", 0.0) + grounds.get("interpolated", 0.0)
    # memory-bound kernels that only profiled steps gave, and how GPUs differ, are the bundled profile's
    assert 0.0 < stragglers < 0.03
    assert own > 0.9 * (1.0 - stragglers) and own + grounds.get("transferred", 0.0) > 0.99


def test_fit_of_a_device_that_no_profile_knows_needs_a_base(cpu_folder: Path, tmp_path: Path, capsys: Captured) -> None:
    fit = ["calibrate", "fit", str(cpu_folder), "--name", "host", "--out", str(tmp_path)]
    capsys.readouterr()
    assert main(fit) == 2
    assert "base" in one_line_of(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
    assert main([*fit, "--base", "h200-hgx"]) == 0
    assert load_cluster(str(tmp_path / "nodes" / "host.yaml"), 8).gpu.name == "host"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--name", "../x"], "is no name of a file"),
        (["--name", "x", "--base", "h200-hg"], "did you mean h200-hgx?"),
    ],
)
def test_wrong_options_of_fit(tmp_path: Path, capsys: Captured, options: list[str], says: str) -> None:
    assert main(["calibrate", "fit", FOLDERS[1], "--out", str(tmp_path), *options]) == 2
    assert says in one_line_of(capsys.readouterr().err)


def test_an_interrupted_fit_writes_nothing(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folders: Any, name: str, out: Path, **how: Any) -> None:
        (out / "gpus").mkdir()
        (out / "gpus" / f"{name}.yaml").write_text("name: my")
        raise KeyboardInterrupt

    monkeypatch.setattr("mofa.calibrate.fits.profile.fit_and_write_profiles", interrupted)
    assert main(["calibrate", "fit", FOLDERS[0], "--name", "my-node", "--out", str(tmp_path)]) == 130
    assert list(tmp_path.iterdir()) == []


def test_nccl_changes_the_profile_that_is_named(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = tmp_path / "hardware_profiles" / "nodes"
    nodes.mkdir(parents=True)
    shutil.copy(ROOT / "hardware_profiles" / "nodes" / "h200-hgx.yaml", nodes / "my-h200.yaml")
    (tmp_path / "all_reduce_perf.txt").write_text(TEXT)
    assert main(["calibrate", "nccl", "all_reduce_perf.txt", "--profile", "my-h200"]) == 0
    out, err = capsys.readouterr()
    told = (
        "hardware_profiles/nodes/my-h200.yaml: intra.efficiency = 0.8, collectives.all_reduce 8 (all_reduce, 21 sizes)"
    )
    assert (out, err) == (f"{told}\n", "")
    assert [path.name for path in nodes.iterdir()] == ["my-h200.yaml"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TEXT[: TEXT.rindex("2147483648") + 4], "line 32: truncated after 2 columns"),
        (TEXT[: TEXT.index("31400.0")], "truncated after 5 columns"),
        (TEXT[: TEXT.index("# Avg")], "last line '# Avg bus bandwidth' is missing"),
        ("", "no rows of size and time"),
    ],
)
def test_truncated_nccl_output_leaves_the_profile(tmp_path: Path, capsys: Captured, text: str, says: str) -> None:
    profile = Path(shutil.copy(ROOT / "hardware_profiles" / "nodes" / "h200-hgx.yaml", tmp_path / "h200.yaml"))
    before = profile.read_bytes()
    file = tmp_path / "all_reduce_perf.txt"
    file.write_text(text)
    assert main(["calibrate", "nccl", str(file), "--profile", str(profile)]) == 2
    assert says in one_line_of(capsys.readouterr().err)
    assert profile.read_bytes() == before


def test_check_prints_json_and_nothing_else(capsys: Captured) -> None:
    assert main(["calibrate", "check", *FOLDERS, "--json"]) == 0
    out, err = capsys.readouterr()
    families = json.loads(out)["families"]
    assert err == ""
    assert set(families) == {"gemm", "grouped_gemm", "attention", "memory_bound", "collective"}
    for family in families.values():
        assert {"points", "median_abs_error", "p90_abs_error", "bias"} <= set(family)
        assert family["points"] >= 60


def test_check_prints_a_table_and_every_op(capsys: Captured) -> None:
    assert main(["calibrate", "check", FOLDERS[2], "--by-op"]) == 0
    out = capsys.readouterr().out
    assert "collective nccl all_gather" in out
    line = next(line for line in out.splitlines() if line.startswith("collective"))
    assert line.split()[-1] == "yes"


def test_check_writes_a_figure_per_family(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "figures"
    assert main(["calibrate", "check", FOLDERS[1], FOLDERS[2], "--json", "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    names = {path.name for path in out.iterdir()}
    assert names == {"check.json", "points.csv", "collective.png", "collective.svg"}
    assert err == f"wrote 4 files to {out}\n"
    assert json.loads((out / "check.json").read_text()) == json.loads(printed)
    rows = list(csv.DictReader((out / "points.csv").read_text().splitlines()))
    assert {row["split"] for row in rows} == {"grid", "heldout"}
    layers = json.loads(printed)["chunked_moe"]["all"]  # the planner's own chunks, by the bundled profile
    assert layers["layers"] == 64 and layers["peak_bytes"] < 0.03 and layers["step"] < 0.1
    assert len(rows) > 200


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[:-20], "truncated"),
        (lambda text: text.replace(",us,", ",ms,", 1), "units are not to be mixed"),
        (lambda text: text.replace("NVIDIA H200", "NVIDIA H100"), "environment.json is of 'NVIDIA H200'"),
        (lambda text: "", "line 1: not the header"),
    ],
)
@pytest.mark.parametrize("command", ["check", "fit"])
def test_corrupt_measurements_are_one_line_and_kept(
    tmp_path: Path, capsys: Captured, damage: Any, says: str, command: str
) -> None:
    folder = Path(shutil.copytree(FOLDERS[1], tmp_path / "m"))
    (folder / "overlap.csv").unlink()
    (folder / "chunked_moe.csv").unlink()
    file = folder / "collective.csv"
    file.write_text(damage(file.read_text()))
    before = file.read_bytes()
    more = ["--name", "x", "--out", str(tmp_path / "out")] if command == "fit" else ["--out", str(tmp_path / "out")]
    assert main(["calibrate", command, str(folder), *more]) == 2
    assert says in one_line_of(capsys.readouterr().err)
    assert file.read_bytes() == before
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: Captured) -> None:
    assert main(["calibrate", "check", str(tmp_path / "absent")]) == 2
    assert "no such folder" in one_line_of(capsys.readouterr().err)
