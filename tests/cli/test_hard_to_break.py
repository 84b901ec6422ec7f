"""What a user can write wrong, a kind a test: status 2, one line, and no input changed; see tests/fuzz for files."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args, get_origin

import numpy as np
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mofa.cost.breakdown import TIME_COMPONENTS
from mofa.cost.physical_steps import refuse_unphysical_steps
from mofa.errors import SpecError
from mofa.faults.calculator import calculate_goodput
from mofa.measure.records import RunRecord
from mofa.search.space import max_pipeline_stages
from mofa.specs.base import Fact
from mofa.specs.faults import FaultSpec
from mofa.specs.files import load_json, parse_yaml
from mofa.specs.framework import FrameworkSpec
from mofa.specs.hardware import GpuSpec, NodeSpec
from mofa.specs.limited_reads import gunzipped, parse_json, read_bytes
from mofa.specs.load import load_cluster, load_workload, parse_set_options
from mofa.specs.run import RunSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec
from mofa.specs.write_files import (
    NAMES_BY_COMMAND,
    NAMES_IN_FOLDERS,
    all_files_or_none,
    check_result_places,
    check_writable,
    write_file_atomically,
)
from mofa.validate.hosts import MachineHosts
from mofa.validate.published import PublishedFile
from tests.cli.conftest import Cli
from tests.committed import read_yaml, yaml_text

ROOT = Path(__file__).resolve().parents[2]
JOB = ("h100-hgx", "--gpus", "8", "--strategy", "tp=2", "--no-replay")


# --- facts have ranges


@pytest.fixture(scope="module")
def h100() -> tuple[dict[str, Any], dict[str, Any]]:
    gpu = read_yaml(ROOT / "hardware_profiles/gpus/h100-sxm.yaml")
    return gpu, read_yaml(ROOT / "hardware_profiles/nodes/h100-hgx.yaml")


def _refused(folder: Path, gpu: Any, node: Any) -> str:
    for kind, facts, name in (("gpus", gpu, "h100-sxm"), ("nodes", node, "n")):
        (folder / kind).mkdir()
        (folder / kind / f"{name}.yaml").write_text(yaml_text(facts))
    with pytest.raises(SpecError) as error:
        load_cluster(folder / "nodes/n.yaml", 8)
    return str(error.value)


def _attention(gpu: Any, **form: object) -> None:
    next(iter(gpu["curves"]["attention"].values()))["form"].update(form)


def _form(gpu: Any, family: str, key: str = "bf16", **form: object) -> None:
    gpu["curves"][family][key]["form"].update(form)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g, n: _attention(g, slots=-1), "form.slots (-1)"),
        (lambda g, n: _attention(g, causal=-1), "form.causal (-1)"),
        (lambda g, n: g["curves"]["gemm"]["bf16"]["form"].update(bytes_per_s=-1), "gemm.bf16.form.bytes_per_s (-1)"),
        (lambda g, n: g["curves"]["gemm"]["bf16"]["form"].update(tiles=[]), "gemm.bf16.form.tiles"),
        (lambda g, n: g["curves"]["gemm"]["bf16"]["form"].update(floor_s=-1), "gemm.bf16.form.floor_s (-1)"),
        (lambda g, n: g["curves"]["gemm"]["bf16"]["form"].update(tiles=[[128, 128, 2e15]]), "above peak_flops"),
        (lambda g, n: _attention(g, unit_s=1e-12), "above peak_flops"),
        (lambda g, n: g["curves"]["stream"]["default"]["form"].update(bytes_per_s=1e15), "above memory_bandw"),
        (lambda g, n: _form(g, "gemm", bytes_per_s=1e13), "gemm.bf16.form.bytes_per_s reaches 10 TB/s, over 2 times"),
        (lambda g, n: _form(g, "grouped_gemm", bytes_per_s=1e13), "grouped_gemm.bf16.form.bytes_per_s reaches"),
        (lambda g, n: _form(g, "multi_stream", bytes_per_s=1e14), "multi_stream.bf16.form.bytes_per_s reaches"),
        (lambda g, n: _form(g, "multi_stream", added_bytes_per_s=1e13), "multi_stream.bf16.form.added_bytes_per_s"),
        (lambda g, n: _form(g, "multi_stream", slower=0.5), "multi_stream.bf16 reaches"),
        (lambda g, n: _form(g, "multi_stream", slower=0.001), "multi_stream.bf16.form.slower (0.001)"),
        (lambda g, n: _attention(g, bytes_per_s=1e15), "bytes_per_s reaches 1000 TB/s, over 32 times"),
        (lambda g, n: _form(g, "stream", "default", missed_bytes_per_s=1e13), "missed_bytes_per_s reaches 10 TB/s"),
        (lambda g, n: _form(g, "stream", "default", bytes_per_element=1e-300), "form.bytes_per_element (1e-300)"),
        (lambda g, n: _form(g, "gemm", floor_s=True), "gemm.bf16.form.floor_s (True) must be a number"),
        (lambda g, n: _form(g, "gemm", tiles=[[128, True, 8e14]]), "gemm.bf16.form.tiles[0][1] (True) must be a whole"),
        (lambda g, n: n["nic"].update(num_per_node=True), "nic.num_per_node (True) must be a whole number"),
        (lambda g, n: g["curves"]["gemm"]["bf16"].update(sustained=0.3, alone=1.0), "sustained (0.3)"),
        (lambda g, n: n["collectives"]["all_gather 2"]["form"].update(protocols=[[-1e-6, 1e11]]), "protocols[0][0]"),
        (lambda g, n: n["collectives"]["all_gather 2"]["form"].update(protocols=[[1e-6, 1e13]]), "over 2 times"),
    ],
)  # fmt: skip
def test_curves_have_physical_ranges(
    h100: tuple[Any, Any], change: Callable[[Any, Any], None], words: str, tmp_path: Path
) -> None:
    gpu, node = copy.deepcopy(h100)
    change(gpu, node)
    assert words in _refused(tmp_path, gpu, node)


@pytest.mark.parametrize("seconds", [np.inf, np.nan, -1e9])
def test_a_step_that_is_no_time_is_an_error_of_the_profile(seconds: float) -> None:
    exposed = np.zeros((len(TIME_COMPONENTS), 1))
    exposed[TIME_COMPONENTS.index("attention")] = seconds
    made = SimpleNamespace(step_s=exposed.sum(axis=0), exposed_s=exposed)
    with pytest.raises(
        SpecError, match=r"h100-sxm: a step would take .* of which attention .*correct gpu\.curves\.att"
    ):
        refuse_unphysical_steps(cast("Any", made), load_cluster("h100-hgx", 8))


def _numbers(cls: type[BaseModel], seen: set[type], path: str = "") -> list[str]:
    """Fields of numbers below a spec that have no two bounds."""
    if cls in seen or cls is Fact:
        return []
    seen.add(cls)
    fields = {**cls.model_fields}
    return [w for name, field in fields.items() for w in _unbounded(field.annotation, field, seen, f"{path}.{name}")]


def _unbounded(annotation: Any, field: FieldInfo | None, seen: set[type], path: str) -> list[str]:
    metadata = list(field.metadata) if field is not None else []
    while get_origin(annotation) is not None and hasattr(annotation, "__metadata__"):
        metadata += annotation.__metadata__
        annotation = annotation.__origin__
    if annotation in (int, float):
        said = " ".join(map(repr, metadata))
        low, high = ("Ge(" in said or "Gt(" in said or "ge=" in said), ("Le(" in said or "Lt(" in said or "le=" in said)
        return [] if low and high else [path]
    if hasattr(annotation, "__pydantic_fields__") and not issubclass(annotation, BaseModel):
        return [w for name, inner in annotation.__pydantic_fields__.items()
                for w in _unbounded(inner.annotation, inner, seen, f"{path}.{name}")]  # fmt: skip
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _numbers(annotation, seen, path)
    members = get_args(annotation)
    shared = field if len(members) == 2 and type(None) in members else None
    return [w for inner in members if not isinstance(inner, str) for w in _unbounded(inner, shared, seen, path)]


@pytest.mark.parametrize(
    "cls",
    [
        WorkloadSpec,
        GpuSpec,
        NodeSpec,
        FrameworkSpec,
        FaultSpec,
        RunSpec,
        StrategySpec,
        RunRecord,
        PublishedFile,
        MachineHosts,
    ],
)
def test_every_number_of_a_file_has_two_bounds(cls: type[BaseModel]) -> None:
    assert _numbers(cls, set(), cls.__name__) == []


# --- parsers


@pytest.mark.parametrize(
    "text",
    ["!!timestamp x", "!!bool maybe", "!!int x", "9" * 400, "-" + "9" * 400, "0x" + "f" * 500, "2001-99-99",
     "!!float 1:x", "!!python/object:os.system x"],
)  # fmt: skip
def test_what_yaml_constructors_stumble_over_is_one_line(text: str) -> None:
    with pytest.raises(SpecError, match=r"^f: .*write valid YAML$"):
        parse_yaml(f"a: {text}", "f")
    with pytest.raises(SpecError, match=r"--set workload\.tokens: "):
        parse_set_options([f"workload.tokens={text}"])


@pytest.mark.parametrize("text", ['{"a": %s}' % ("9" * 400), '{"a": NaN}', '{"a": [' + "[" * 100_000, "{"])
def test_json_that_cannot_be_read_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    for read in (lambda: parse_json(text, "x.json", "look"), lambda: load_json(tmp_path / "x.json", "x.json")):
        with pytest.raises(SpecError, match=r"^x.json: "):
            read()


def test_tokens_beyond_floats_are_refused() -> None:
    for tokens in (10**400, 1e-320, "1e400", "9" * 400):
        with pytest.raises(SpecError, match="tokens"):
            load_workload("llama3-8b", tokens=tokens)


def test_what_is_packed_unpacks_to_a_bound() -> None:
    import gzip

    bomb = gzip.compress(bytes(2**24), compresslevel=9)
    with pytest.raises(SpecError, match="unpacks to more than 1 MiB"):
        gunzipped(bomb, "x.gz", 2**20, "take a part")
    with pytest.raises(SpecError, match="cut off"):
        gunzipped(bomb[:-20], "x.gz", 2**30, "take a part")
    assert gunzipped(gzip.compress(b"a") + gzip.compress(b"b"), "x.gz", 2**20, "") == b"ab"


def test_files_are_read_up_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(2**20 + 1))
    with pytest.raises(SpecError, match="larger than 1 MiB"):
        read_bytes(tmp_path / "x", "x", 2**20)


# --- paths


@pytest.mark.parametrize("name", ["x" * 300, "loop", "none/x", "nul\0"])
def test_places_that_are_none_are_refused_before_work(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for directory in (False, True):
        if directory and name == "none/x":
            continue  # is made
        with pytest.raises(SpecError):
            check_writable(tmp_path / name, directory=directory)


@pytest.mark.parametrize("name", ["link", "link/x"])
def test_a_directory_behind_a_link_to_nothing_is_refused_before_work(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none")
    with pytest.raises(SpecError, match="is a link to nothing"):
        check_writable(tmp_path / name, directory=True)


def test_folders_without_permission_are_one_line(tmp_path: Path) -> None:
    """As another user than root, where tests run as root."""
    (tmp_path / "closed").mkdir(mode=0o000)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mofa.errors import SpecError\n"
        "from mofa.specs.load import load_workload, load_cluster, load_faults\n"
        "from mofa.specs.run_files import load_runs\n"
        "from mofa.specs.write_files import check_writable\n"
        "from mofa.calibrate.measurements import read_rows\n"
        "from mofa.validate.attribute import read_profile\n"
        "place = Path(sys.argv[1])\n"
        "def read(refused):\n"
        "    try:\n"
        "        refused()\n"
        "    except SpecError as error:\n"
        "        return str(error)\n"
        "    raise AssertionError(refused)\n"
        "def all_of(place):\n"
        "    return [read(refused) for refused in (\n"
        "        lambda: load_workload(place / 'x.yaml'), lambda: load_cluster(place / 'x.yaml', 8),\n"
        "        lambda: load_faults(place / 'x.yaml'), lambda: load_runs(place / 'x.yaml'),\n"
        "        lambda: check_writable(place / 'y' / 'x'), lambda: check_writable(place / 'z', directory=True),\n"
        "        lambda: read_rows(place), lambda: read_rows(place / 'x'), lambda: read_profile(place / 'x'))]\n"
        "read(lambda: load_workload('none.yaml')), read(lambda: load_cluster('none.yaml', 8))\n"
        "read(lambda: load_faults('none.yaml')), read(lambda: load_runs('none.yaml'))\n"
        "os.getuid() == 0 and os.setuid(65534)  # what is imported is root's\n"
        "assert not any('\\n' in words for words in all_of(place))\n"
    )
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(0o755 if folder != tmp_path / "closed" else 0)
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "closed")], capture_output=True, text=True,
                         check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_an_output_that_is_an_input_or_another_output_is_refused(cli: Cli, tmp_path: Path) -> None:
    source = (ROOT / "workloads/llama3-8b.yaml").read_text()
    path, link = tmp_path / "in.yaml", tmp_path / "link.yaml"
    path.write_text(source)
    link.symlink_to(path)
    for out in (path, link):
        with pytest.raises(SpecError, match="is the file"):
            check_result_places({"--json-file": out}, {}, [str(path)])
    with pytest.raises(SpecError, match="names the same file"):
        check_result_places({"--json-file": link, "--csv": path}, {})
    assert cli("estimate", str(path), *JOB, "--quiet", "--csv", str(path)).returncode == 2
    assert path.read_text() == source


def test_a_file_in_the_folder_of_out_is_refused_where_it_has_a_name_that_is_written_there(tmp_path: Path) -> None:
    folder = tmp_path / "same"
    with pytest.raises(SpecError, match="--out names a directory there"):
        check_result_places({"--json-file": folder}, {"--out": folder})
    with pytest.raises(SpecError, match="--out writes a file of that name there"):
        check_result_places({"--json-file": None, "--csv": _made(folder) / "plans.csv"}, {"--out": folder})
    check_result_places({"--json-file": folder / "mine.json"}, {"--out": folder})
    check_result_places({"--json-file": tmp_path / "new/mine.json"}, {"--out": tmp_path / "new"})  # --out makes it
    with pytest.raises(SpecError, match="does not exist; make it first"):
        check_result_places({"--json-file": tmp_path / "new/below/mine.json"}, {"--out": tmp_path / "new"})
    with pytest.raises(SpecError, match="two results of this command are that file"), all_files_or_none():
        for text in (b"1", b"2"):
            write_file_atomically(folder / "x", text)
    sources = [path.read_text() for part in ("report", "cli") for path in (ROOT / "mofa" / part).rglob("*.py")]
    keys = {
        name for text in sources for name in re.findall(r'(?:files\[|[{ ])"([a-z_]+\.(?:json|csv))"(?:\]|:) ', text)
    }
    assert keys == NAMES_IN_FOLDERS


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_why_a_path_cannot_be_reached_is_said(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for name, reason in (("a", "symbolic links"), ("x" * 300, "too long"), ("a/x.yaml", "symbolic links")):
        done = cli("plan", str(tmp_path / name), "h100-hgx", "--gpus", "8")
        assert done.returncode == 2 and "cannot be read" in done.stderr and reason in done.stderr, name
    done = cli("estimate", *JOB, "--csv", str(tmp_path / "a" / "x"))
    assert done.returncode == 2 and "symbolic links" in done.stderr


def test_a_file_that_is_read_is_no_place_of_a_result(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's file is read beside the node's and named nowhere: refused as it is read, before any work."""
    monkeypatch.setattr("mofa.estimate", lambda *_, **__: pytest.fail("work was done"))
    for kind, name in (("gpus", "h100-sxm"), ("nodes", "h100-hgx")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"{name}.yaml").write_text((ROOT / f"hardware_profiles/{kind}/{name}.yaml").read_text())
    gpu = tmp_path / "gpus/h100-sxm.yaml"
    before = gpu.read_bytes()
    ran = cli(
        "estimate", "llama3-8b", str(tmp_path / "nodes/h100-hgx.yaml"), *JOB[1:], "--quiet", "--json-file", str(gpu)
    )
    assert ran.returncode == 2
    assert f"--json-file {gpu}: is a file that is read; name another place" in ran.stderr
    assert gpu.read_bytes() == before


def test_a_folder_of_results_that_holds_an_input_is_refused_before_work(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mofa.find_plans", lambda *_, **__: pytest.fail("work was done"))
    job, other = tmp_path / "plans.csv", tmp_path / "job.yaml"
    for path in (job, other):
        path.write_text((ROOT / "workloads/llama3-8b.yaml").read_text())
    ran = cli("plan", str(job), "h100-hgx", "--gpus", "8", "--out", str(tmp_path))
    assert ran.returncode == 2
    assert f"--out {tmp_path}: writes {job}, a file that is read; name another folder" in ran.stderr
    check_result_places({}, {"--out": tmp_path}, [str(other)], NAMES_BY_COMMAND["plan"])
    check_result_places({}, {"--out": tmp_path}, [str(job)], NAMES_BY_COMMAND["compare"])


def test_an_empty_place_is_refused(cli: Cli) -> None:
    for options in (("--out", ""), ("--out=",), ("--json-file", ""), ("--out", " "), ("--csv=\t",)):
        ran = cli("estimate", "llama3-8b", *JOB, *options)
        assert ran.returncode == 2
        assert "is empty" in ran.stderr


def test_a_file_that_is_named_as_a_folder_is_refused(cli: Cli, tmp_path: Path) -> None:
    ran = cli("estimate", "llama3-8b", *JOB, "--json-file", f"{tmp_path}/new/")
    assert ran.returncode == 2
    assert "names a folder, and one file is written; name a file in it" in ran.stderr
    assert not (tmp_path / "new").exists()


def test_sets_of_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), all_files_or_none():
        write_file_atomically(tmp_path / "a", b"a")
        raise ZeroDivisionError
    with pytest.raises(SpecError, match="cannot be written"), all_files_or_none():
        write_file_atomically(tmp_path / "a", b"a")
        write_file_atomically(tmp_path / "none" / "b", b"b")
    assert list(tmp_path.iterdir()) == []
    with all_files_or_none():
        write_file_atomically(tmp_path / "a", b"a")
        write_file_atomically(tmp_path / "b", b"b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_names_of_files_up_to_255_bytes_are_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    check_writable(path)
    write_file_atomically(path, b"a")
    assert path.read_bytes() == b"a"


# --- work has bounds


@pytest.mark.parametrize(
    ("path", "value"),
    [("workload.model.num_mtp_layers", "1000000000"), ("workload.model.num_layers", "1000000"),
     ("workload.model.moe.num_experts", "1000000"), ("framework.dispatch_syncs", "1000000000"),
     ("framework.loss_metrics", "1000000000"), ("workload.batch.global_batch", "1000000000000")],
)  # fmt: skip
def test_counts_that_are_looped_over_have_a_cap(cli: Cli, path: str, value: str) -> None:
    ran = cli("estimate", "mixtral-8x7b", *JOB, "--set", f"{path}={value}")
    assert ran.returncode == 2
    assert path.split(".", 1)[1].split(".")[-1] in ran.stderr


def test_a_step_of_too_many_computations_is_refused_at_once(cli: Cli, tmp_path: Path) -> None:
    for command, more in (("estimate", ()), ("trace", ("--out", str(tmp_path / "t.json")))):
        ran = cli(command, "llama3-8b", *JOB[:3], "--strategy", "pp=8", "--global-batch", "1000000", *more)
        assert ran.returncode == 2
        assert "16,000,000 computations, more than the 400,000" in ran.stderr


# --- terminals and files


def test_debug_shows_where_an_error_is_from(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOFA_DEBUG", "1")
    ran = cli("calibrate", "check", "x" * 300)
    assert ran.returncode == 2
    assert "Traceback" in ran.stderr


# --- arithmetic at the edges


TIMES = [(1e15 * 86400, 0.0, 600.0), (1e-6, 1e6, 1e6), (21600.0, 1e-9, 0.0), (1e21, 1e21, 1e21), (1.0, 0.0, 1e21)]


@pytest.mark.parametrize(
    ("times", "shape"),
    [*((times, 1.0) for times in TIMES), *((times, (0.2, 5.0)[i % 2]) for i, times in enumerate(TIMES))],
)
def test_shares_stay_between_0_and_1(times: tuple[float, float, float], shape: float) -> None:
    for interval_s in (None, 3600.0) if shape == 1.0 else (3600.0,):
        try:
            found = calculate_goodput(*times, interval_s=interval_s, shape=shape, days=1e-3, num_runs=2)
        except SpecError:
            continue
        assert 0.0 <= found.ettr <= 1.0
        assert sum(found.ledger.model_dump().values()) == pytest.approx(1.0)


def test_heavy_tails_meet_their_simulation_or_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mofa.faults.calculator.MAX_EVENTS", 1.2e5)
    assert calculate_goodput(21600.0, 300.0, 600.0, shape=0.1).ettr_monte_carlo is None
    simulated = calculate_goodput(21600.0, 300.0, 600.0, shape=0.3)
    of_runs = simulated.ettr_monte_carlo
    assert of_runs is not None
    assert of_runs.standard_error is not None
    assert abs(of_runs.mean - simulated.ettr) < 4.0 * of_runs.standard_error


def test_plan_searches_the_stages_that_estimate_takes(cli: Cli) -> None:
    assert max_pipeline_stages(1) == 3
    job = ("mixtral-8x7b", "h100-hgx", "--gpus", "2", "--seq-len", "1", "--global-batch", "1", "--set",
           "workload.model.num_layers=1", "--no-replay", "--quiet")  # fmt: skip
    assert cli("estimate", *job, "--strategy", "pp=2").returncode == 0
    planned = cli("plan", *job)
    assert planned.returncode == 0
    assert "pp=2" in planned.stdout
