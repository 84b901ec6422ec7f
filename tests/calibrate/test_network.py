"""A cluster's network out of nccl-tests over several nodes: public runs, made-up ones, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mofa.calibrate.fits.nccl_import import NodeProfileChanges, import_nccl_tests_runs
from mofa.cli.main import main
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.topology import ProcessGroup
from mofa.errors import SpecError
from mofa.specs.load import load_cluster
from tests.committed import read_yaml, yaml_text

ROOT = Path(__file__).parents[2]
PROGRAMS = {"all_gather": "all_gather", "all_reduce": "all_reduce", "all_to_all": "alltoall",
            "reduce_scatter": "reduce_scatter"}  # fmt: skip
SIZES = [2**k for k in range(14, 31, 2)]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return Path(shutil.copy(ROOT / "hardware_profiles" / "nodes" / "h100-hgx.yaml", tmp_path / "h100-hgx.yaml"))


def written(folder: Path, name: str, op: str, hosts: int, rows: Sequence[tuple[int, float]], nccl: int = 22809) -> Path:
    """A run of nccl-tests on nodes of eight, as its ``--json`` has it; sizes and microseconds."""
    devices = [{"hostname": f"n{i // 8}", "device_info": "NVIDIA H100 80GB HBM3"} for i in range(8 * hosts)]
    results = [{"size": size, "out_of_place": {"time": time_us}} for size, time_us in rows]
    config = {"nthreads": 1, "ngpus": 1, "devices": devices}
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"args": [f"{PROGRAMS[op]}_perf"], "nccl_version": nccl, "config": config,
                                "results": results, "out_of_bounds": {"count": 0}}))  # fmt: skip
    return file


def planned_s(profile: Path, op: str, hosts: int, sizes: Sequence[int]) -> np.ndarray:
    """What the planner says."""
    place = ProcessGroup(np.array([8 * hosts]), np.array([8]), np.array([8]))
    return np.array([
        float(collective_s(op, np.array([float(size)]), place, load_cluster(profile, 8 * hosts))[0])  # type: ignore[arg-type]
        for size in sizes
    ])  # fmt: skip


def made_up(folder: Path, profile: Path, hosts: Sequence[int] = (2, 4)) -> list[Path]:
    """Files that the planner's own formula wrote, of a network with other facts than the bundled node's."""
    node = read_yaml(profile)
    for name, value in (("latency_s", "25 us"), ("efficiency", 0.7), ("all_to_all_efficiency", 0.5)):
        node["nic"][name] = {"value": value, "provenance": "assumed", "source": "made up"}
    other = folder / "other.yaml"
    other.write_text(yaml_text(node))
    return [
        written(folder, f"{op}-{n}", op, n, list(zip(SIZES, planned_s(other, op, n, SIZES) * 1e6, strict=True)))
        for op in ("all_gather", "all_reduce", "all_to_all")
        for n in hosts
    ]


def test_a_network_that_the_formula_made_is_found(tmp_path: Path, profile: Path) -> None:
    found = import_nccl_tests_runs(made_up(tmp_path, profile), profile)
    assert found.facts["nic.latency_s"] == pytest.approx(25e-6, rel=0.05)
    assert found.facts["nic.efficiency"] == pytest.approx(0.7, rel=0.02)
    assert found.facts["nic.all_to_all_efficiency"] == pytest.approx(0.5, rel=0.02)
    nic = load_cluster(profile, 16).node.nic
    assert nic.latency_s.value == pytest.approx(found.facts["nic.latency_s"], rel=0.01)
    assert nic.latency_s.provenance == nic.efficiency.provenance == "measured"
    assert "6 files" in nic.efficiency.source
    assert len(found.errors) == 6
    for errors in found.errors.values():
        assert errors.fitted < 0.03 < errors.before
        assert errors.by_others is not None and errors.by_others < 0.03


def test_what_was_not_measured_stays(tmp_path: Path, profile: Path) -> None:
    before = load_cluster(profile, 16).node.nic
    files = [file for file in made_up(tmp_path, profile) if "to_all" in file.name]
    found = import_nccl_tests_runs(files, profile)
    assert set(found.facts) == {"nic.latency_s", "nic.all_to_all_efficiency"}
    assert load_cluster(profile, 16).node.nic.efficiency == before.efficiency


def public_files(folder: Path, source: str, least: int, most: int) -> list[Path]:
    """Public points of one cluster as the tool would have written them, a file for each collective and node count."""
    points = pd.read_csv(ROOT / "reference_runs" / "collectives" / "between_nodes.csv")
    chosen = points[points.source.str.contains(source) & points.nodes.between(least, most)]
    names = {program: op for op, program in PROGRAMS.items()}
    files = []
    for (program, _), part in chosen[chosen.collective.isin(list(names))].groupby(["collective", "nodes"]):
        nodes = int(part.nodes.iloc[0])
        rows = [(int(size), float(time)) for size, time in zip(part.size_bytes, part.time_us, strict=True)]
        files.append(written(folder, f"{program}-{nodes}", names[str(program)], nodes, rows))
    return files


def test_a_slow_network_is_learned_from_its_own_runs(tmp_path: Path, profile: Path) -> None:
    """Five collectives on ten nodes of H100 whose InfiniBand is a seventh slower than what is bundled says."""
    found = import_nccl_tests_runs(public_files(tmp_path, "xxrjun/nccl-tests-cluster.*N10_G8", 10, 10), profile)
    before, now = (np.median([getattr(e, name) for e in found.errors.values()]) for name in ("before", "fitted"))
    assert before > 0.1 and now < 0.06
    assert max(e.by_others for e in found.errors.values() if e.by_others is not None) < 0.2


def test_a_few_nodes_tell_of_more(tmp_path: Path, profile: Path) -> None:
    """EFA on H100, fitted on 2 and 4 nodes, predicts 8 to 32 of them."""
    source = "crazyguitar/aws-gpu-communication-benchmark"
    import_nccl_tests_runs(public_files(tmp_path, source, 2, 4), profile)
    errors = []
    for file in public_files(tmp_path, source, 8, 32):
        document = json.loads(file.read_text())
        rows = [(r["size"], r["out_of_place"]["time"]) for r in document["results"] if r["size"] >= 2**14]
        hosts = len(document["config"]["devices"]) // 8
        op = next(op for op, program in PROGRAMS.items() if file.name.startswith(f"{program}-"))
        errors += list(abs(planned_s(profile, op, hosts, [r[0] for r in rows]) * 1e6 / [r[1] for r in rows] - 1))
    assert len(errors) >= 30
    assert np.median(errors) < 0.10 and np.quantile(errors, 0.9) < 0.30


def test_the_errors_are_told(tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = made_up(tmp_path, profile, hosts=(2,))
    assert main(["calibrate", "nccl", *map(str, files), "--profile", str(profile)]) == 0
    said = capsys.readouterr().out
    assert "nic.latency_s = 2" in said and "nic.all_to_all_efficiency = 0.5" in said
    assert "by the others" in said and all(file.name in said for file in files)


def _refused(files: Sequence[Path], profile: Path) -> str:
    before = profile.read_text()
    with pytest.raises(SpecError) as error:
        import_nccl_tests_runs(files, profile)
    assert profile.read_text() == before
    return str(error.value)


def test_results_of_another_nccl_are_refused(tmp_path: Path, profile: Path) -> None:
    rows = [(size, 500.0) for size in SIZES]
    first = written(tmp_path, "first", "all_gather", 2, rows)
    assert "NCCL 2.18, but" in _refused([first, written(tmp_path, "old", "all_reduce", 2, rows, 21805)], profile)
    assert "ran with NCCL 3.1; what" in _refused([written(tmp_path, "new", "all_gather", 2, rows, 30105)], profile)


def test_a_network_that_is_faster_than_its_ports_is_refused(tmp_path: Path, profile: Path) -> None:
    """Either the share of the ports says so, or the domain's own links, which such a ring passes as well."""
    rows: list[tuple[int, float]] = [(size, 20.0 + size / 2e6) for size in SIZES]
    said = _refused([written(tmp_path, "fast", "all_gather", 2, rows)], profile)
    assert "fast.json: off by" in said and "is this the right profile?" in said
    rows = [(size, 20.0 + size / 4e5) for size in SIZES]
    said = _refused([written(tmp_path, "all_to_all", "all_to_all", 2, rows)], profile)
    assert "of the nic link of 50 GB/s" in said and "is this the right profile?" in said


def test_so_many_files_are_no_calibration(tmp_path: Path, profile: Path) -> None:
    assert "257 files are more than 256" in _refused([tmp_path / "all_reduce.txt"] * 257, profile)


def test_runs_inside_and_between_nodes_go_in_together(tmp_path: Path, profile: Path) -> None:
    files = made_up(tmp_path, profile, hosts=(2,))
    inside = written(tmp_path, "inside", "all_gather", 1, [(size, 20.0 + size / 3e5) for size in SIZES])
    found: NodeProfileChanges = import_nccl_tests_runs([inside, *files], profile)
    assert found.curves == ("all_gather 8",)
    assert {"intra.efficiency", "nic.efficiency", "nic.latency_s", "nic.all_to_all_efficiency"} == set(found.facts)
