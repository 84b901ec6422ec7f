"""Traces of MLCommons Chakra: written through its package and read back by its own reader (mlc-chakra 1.0.0)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mofa.cli.main import main
from mofa.export.chakra import PACKAGE_VERSION, read_chakra_trace
from tests.export.frameworks import wheel

JOB = ("llama3-8b", "h100-hgx", "--gpus", "8", "--global-batch", "16", "--strategy", "tp=2 pp=4 micro_batch=1")


@pytest.fixture(scope="module")
def package() -> Iterator[Path]:
    """Chakra's package, to be imported."""
    folder = wheel(f"mlc_chakra-{PACKAGE_VERSION}")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "chakra"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def folder(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of the first and the last rank of a pipeline."""
    out = tmp_path_factory.mktemp("chakra")
    assert main(["trace", *JOB, "--ranks", "0,3", "--format", "chakra", "--out", str(out / "step"), "--quiet"]) == 0
    return out


def attributes(record: Any) -> dict[str, Any]:
    return {each.name: getattr(each, each.WhichOneof("value")) for each in record.attr}


def test_a_file_for_each_rank_and_all_nodes_in_order(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"step.0.et", "step.3.et"}
    for rank in (0, 3):
        record, nodes = read_chakra_trace((folder / f"step.{rank}.et").read_bytes())
        assert record.version and attributes(record)["pipeline_rank"] == rank
        assert [node.id for node in nodes] == list(range(len(nodes))) and len(nodes) > 5000
        end: dict[int, int] = {}
        for node in nodes:
            assert all(other < node.id for other in node.data_deps)
            last = max((end[other] for other in node.data_deps), default=0)
            assert last <= node.start_time_micros  # whole microseconds of both are rounded alike
            end[node.id] = node.start_time_micros + node.duration_micros


def test_durations_of_a_stream_add_up(folder: Path) -> None:
    """Those of the computing stream and what it waits for are the step; microseconds are off by roundings alone."""
    _, nodes = read_chakra_trace((folder / "step.0.et").read_bytes())
    step_s = attributes(read_chakra_trace((folder / "step.0.et").read_bytes())[0])["step_s"]
    computing = [node for node in nodes if attributes(node)["stream"] == "compute"]
    exact_s = sum(attributes(node)["duration_s"] for node in computing)
    assert 0.5 * step_s < exact_s < step_s
    assert abs(sum(node.duration_micros for node in computing) * 1e-6 - exact_s) <= len(computing) * 1e-6
    ends = sorted((node.start_time_micros, node.start_time_micros + node.duration_micros) for node in computing)
    gaps_s = sum(max(b[0] - a[1], 0) for a, b in pairwise(ends)) * 1e-6
    assert exact_s + gaps_s + ends[0][0] * 1e-6 == pytest.approx(step_s, abs=len(ends) * 1e-6)


def test_nodes_say_type_size_and_group(folder: Path, package: Path) -> None:
    from chakra.schema.protobuf import et_def_pb2 as chakra  # type: ignore[import-not-found,unused-ignore]

    _, nodes = read_chakra_trace((folder / "step.0.et").read_bytes())
    collectives = [attributes(node) for node in nodes if node.type == chakra.COMM_COLL_NODE]
    of_tp = [each for each in collectives if each["pg_name"] == "tp"]
    assert {each["comm_type"] for each in of_tp} == {chakra.ALL_GATHER, chakra.REDUCE_SCATTER}
    assert {each["comm_size"] for each in of_tp} >= {8192 * 4096 * 2} and {each["group_size"] for each in of_tp} == {2}
    sends = [attributes(node) for node in nodes if node.type == chakra.COMM_SEND_NODE]
    assert len(sends) == 16 and {each["comm_dst"] for each in sends} == {1}
    assert {each["comm_size"] for each in sends} == {8192 * 4096 * 2 // 2}  # a sequence-parallel rank's half
    flops = sum(attributes(node).get("num_ops", 0) for node in nodes if node.type == chakra.COMP_NODE)
    products = 6 * 8 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) * 8192  # of eight layers, by hand
    attention = 8 * 2 * 32 * (8192 * 8193 / 2) * 7 * 128  # two products forth and five back
    assert flops == pytest.approx(16 * (products + attention) / 2, rel=1e-9)
    assert all(attributes(node)["tensor_size"] >= 0 for node in nodes if node.type == chakra.COMP_NODE)


def test_chakras_own_program_reads_the_file(folder: Path, package: Path, tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    command = [sys.executable, "-m", "chakra.src.jsonizer.jsonizer", "--input_filename", str(folder / "step.3.et"),
               "--output_filename", str(out)]  # fmt: skip
    subprocess.run(command, check=True, env={"PYTHONPATH": str(package)}, cwd=tmp_path)
    text, decoder, position, records = out.read_text(), json.JSONDecoder(), 0, []
    while position < len(text):
        record, position = decoder.raw_decode(text, position)
        records.append(record)
    assert records[0]["version"] and records[1]["type"] in ("COMM_RECV_NODE", "COMP_NODE", "COMM_COLL_NODE")
    assert len(records) - 1 == len(read_chakra_trace((folder / "step.3.et").read_bytes())[1])


def test_what_is_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "chakra", None)
    monkeypatch.setitem(sys.modules, "chakra.schema", None)
    monkeypatch.setitem(sys.modules, "chakra.schema.protobuf", None)
    assert main(["trace", *JOB, "--format", "chakra", "--out", str(tmp_path / "x")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install 'mofa[chakra]'" in said and not list(tmp_path.iterdir())


def test_jitter_is_refused(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *JOB, "--format", "chakra", "--jitter", "0.1", "--out", str(tmp_path / "x")]) == 2
    assert "--jitter" in capsys.readouterr().err
