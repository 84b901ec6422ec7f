"""A short run of the fuzzer, and what its long ones and others broke, a test for each kind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from mofa.calibrate.fits.nccl_tests import read_nccl_tests_output
from mofa.errors import SpecError
from mofa.export.read_job import read_job
from mofa.routing.counts import CountedModel, read_counts
from mofa.routing.placement_file import read_placement
from mofa.specs.load import load_cluster
from mofa.validate.attribute import read_profile
from mofa.validate.reference import reference_of_file
from tests.fuzz.commands import drawn_command
from tests.fuzz.jobs import fuzz_jobs
from tests.fuzz.mutations import truths_for_numbers
from tests.fuzz.number_paths import drawn_setting, number_paths
from tests.fuzz.readers import MEGATRON, NCCL, TOML, kinds
from tests.fuzz.run import Findings, fuzz_readers

FOREVER = float("inf")


def test_mutated_inputs_are_taken_or_refused_in_one_line(tmp_path: Path) -> None:
    findings = Findings()
    fuzz_readers(findings, random.Random(0), tmp_path, inputs=400, until=FOREVER)
    assert not findings.broken
    assert sum(findings.tried.values()) == 400


def test_every_example_is_sound(tmp_path: Path) -> None:
    from tests.fuzz.readers import _as_text

    for kind in kinds():
        for name, text in ((kind.file, None), *kind.beside):
            path = tmp_path / kind.name.replace(" ", "-") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            example = kind.example if isinstance(kind.example, str) else _as_text(kind.example, kind.file)
            path.write_text(example if text is None else text)
        kind.read(tmp_path / kind.name.replace(" ", "-") / kind.file)


def test_random_jobs_keep_their_invariants(tmp_path: Path) -> None:
    findings = Findings()
    fuzz_jobs(findings, random.Random(2), tmp_path, inputs=24, until=monotonic() + 60.0)
    assert not findings.broken
    assert findings.accepted["job"]


@pytest.mark.parametrize(
    ("name", "text", "read", "words"),
    [
        ("a.csv", f"iteration,layer,expert,tokens\n0,0,0,{'9' * 400}\n", lambda p: read_counts(p, CountedModel("m", 1)),
         "digits|is no number"),
        ("p.csv", f"expert,gpu\n0,{'9' * 400}\n", lambda p: read_placement(p, 1, 1, 1), "digits|is no number"),
        ("job.sh", MEGATRON.replace("=8", "=8²", 1), lambda p: read_job("megatron", p), None),
        ("job.sh", MEGATRON.replace("heads 32", "heads 0", 1), lambda p: read_job("megatron", p), "make no job"),
        ("job.sh", MEGATRON.replace("size 4096", "size " + "9" * 400, 1).replace("--ffn-hidden-size 14336", ""),
         lambda p: read_job("megatron", p), "numbers make no job"),
        ("job.toml", TOML.replace("parallel_degree = 2", "parallel_degree = 0"), lambda p: read_job("torchtitan", p, 8),
         "of at least 1"),
        ("t.json", '{"traceEvents": [{"name": []}, {"cat": "kernel", "name": "x", "ts": 1, "dur": -1}]}', read_profile,
         "takes -1 us"),
        ("k.json", '{"kernels_us": [[0, "gemm", 1.0, true]]}', read_profile, "True is no number"),
        ("k.json", '{"kernels_us": [[true, "gemm", 1.0, 2.0]]}', read_profile, "True is no number"),
        ("n.json", json.dumps(NCCL).replace('"time": 5.0', '"time": true'), read_nccl_tests_output, None),
        ("n.json", json.dumps(NCCL).replace('"time": 25.0', '"time": true'), read_nccl_tests_output,
         "another kind of value"),
        ("r.yaml", "measured: {}\nenvironment: {}\nrun: {framework: {}}\n", lambda p: reference_of_file(p, p.parent),
         "missing"),
    ],
)  # fmt: skip
def test_what_was_broken_before(
    name: str, text: str, read: Callable[[Path], object], words: str | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    if words is None:
        read(tmp_path / name)
        return
    with pytest.raises(SpecError, match=words):
        read(tmp_path / name)


def test_extreme_values_are_drawn_for_every_root(tmp_path: Path) -> None:
    draw = random.Random(0)
    for root in ("hardware.gpu.", "hardware.node.", "framework.", "workload."):
        drawn = {drawn_setting(draw, root) for _ in range(50)}
        assert len(drawn) > 30 and all(path.startswith(root) for path, _ in drawn)
    assert number_paths()["hardware.gpu.curves.multi_stream.bf16.form.slower"]
    options = {word for _ in range(400) for word in drawn_command(draw, tmp_path) if word.startswith("--")}
    assert {"--storage", "--price", "--log-days", "--log-nodes", "--jobs", "--memory-limit", "--spares", "--headroom",
            "--checkpoint-interval", "--refine-seconds", "--capacity-factor", "--threshold"} <= options  # fmt: skip


def test_truths_in_place_of_numbers_are_found() -> None:
    before = {"a": 1, "b": [1.0, {"c": 2}], "d": True, "e": "x"}
    after = {"a": True, "b": [1.0, {"c": False}], "d": False, "e": True}
    assert truths_for_numbers(before, after) == [("a",), ("b", 1, "c")]


@pytest.mark.parametrize("value", ["inf", "1e-320", "0", "-1", "1e308"])
def test_scaling_by_numbers_that_are_none(value: str) -> None:
    with pytest.raises(SpecError, match="num_sms"):
        load_cluster("h100-hgx", 8, {"gpu.num_sms": float(value)})
