"""Records: their schema, the split, writing, and every committed one."""

from __future__ import annotations

import functools
import gzip
import hashlib
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mofa.errors import SpecError
from mofa.measure.expand import ExpandedRun, current_configuration_hash, expand_run
from mofa.measure.records import (
    RunRecord,
    Split,
    assign_fitting_and_judging_halves,
    configuration_hash,
    read_record,
    write_record,
)
from mofa.measure.results import merge_rank_results
from mofa.specs.files import load_yaml
from mofa.specs.model import ModelSpec
from mofa.specs.params import num_params
from mofa.specs.run import RunSpec
from tests.committed import MEASURED, measured_names, measured_record, measured_records

MODEL = {
    "name": "tiny", "source": "this test", "num_layers": 2, "hidden": 128, "vocab": 512,
    "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}, "mlp": {"ffn_hidden": 256},
}  # fmt: skip


def spec(id: str = "a", **changes: object) -> RunSpec:
    raw = {
        "id": id, "model": MODEL, "framework": {"name": "torchtitan"}, "hardware": "h200-hgx", "gpus": 1,
        "strategy": {}, "batch": {"seq_len": 64, "micro": 1, "global": 1}, **changes,
    }  # fmt: skip
    return RunSpec.model_validate(raw)


def rank(number: int, times: list[float]) -> dict[str, object]:
    memory = {"peak_allocated_bytes": 10, "peak_reserved_bytes": 12, "device_bytes": 14, "device_total_bytes": 20}
    memory |= {"allocated_bytes": 3, "reserved_bytes": 12, "alloc_retries": 0}
    return {
        "rank": number, "outcome": "ok", "memory": memory, "memory_whole": memory, "memory_ready": memory,
        "step_times_s": times, "warmup_times_s": [9.0], "facts": {"layers": [["0", "1"]]}, "phase_of_end": "done",
    }  # fmt: skip


def record(id: str = "a") -> RunRecord:
    environment = {
        "gpu": "GPU", "num_gpus": 1, "cpu": "CPU", "cpu_cores": 1, "python": "3", "torch": "2", "cuda": "13",
        "cudnn": 9, "nccl": "2", "framework": "0.2.2", "allocator": "",
    }  # fmt: skip
    return RunRecord.model_validate(
        {
            "run": spec(id),
            "measured": merge_rank_results([rank(0, [0.1, 0.2, 0.3])]),
            "environment": environment,
            "source": "this test",
            "split": "fitting",
        }
    )


def test_the_norms_of_its_steps_say_whether_the_median_one_scales_its_gradients() -> None:
    """Megatron scales above a norm of 1; norms that are no numbers are left out."""
    norms = {"grad_norms": [0.5, 1.23456, float("inf"), 2.0]}
    measured = merge_rank_results([{**rank(0, [0.1, 0.2, 0.3]), **norms}])
    assert measured.grad_norms == [0.5, 1.235, 2.0]
    assert measured.clips_in_median_step is True
    assert measured.model_copy(update={"grad_norms": [0.5, 0.6, 2.0]}).clips_in_median_step is False
    assert merge_rank_results([rank(0, [0.1, 0.2, 0.3])]).clips_in_median_step is None


def test_the_slowest_rank_gives_the_step_time() -> None:
    measured = merge_rank_results([rank(0, [0.1, 0.1, 0.9]), rank(1, [0.2, 0.3, 0.4])])
    assert measured.step_time_s == 0.3
    assert measured.step_time_spread_s == pytest.approx(0.1)
    assert measured.facts["layers"] == [[["0", "1"]], [["0", "1"]]]


def test_out_of_memory_is_a_result() -> None:
    short = {**rank(1, []), "outcome": "oom", "error": "OutOfMemoryError: no room", "phase_of_end": "first step"}
    measured = merge_rank_results([short])
    assert (measured.outcome, measured.oom_phase, measured.step_time_s) == ("oom", "first step", None)
    assert measured.ranks[0].between_steps_bytes is None


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    path = write_record(record(), tmp_path)
    assert read_record(path) == record()
    assert [p.name for p in tmp_path.iterdir()] == ["a.yaml"]


def test_a_broken_record_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("run: 1\n")
    with pytest.raises(SpecError, match="no record of a measured run"):
        read_record(path)


def test_the_hash_ignores_names_and_sees_everything_else() -> None:
    named = spec("b", model={**MODEL, "name": "other", "source": "elsewhere"})
    assert configuration_hash(spec()) == configuration_hash(named)
    assert configuration_hash(spec()) != configuration_hash(
        spec(gpus=2, batch={"seq_len": 64, "micro": 1, "global": 2})
    )
    assert configuration_hash(spec()) != configuration_hash(spec(framework={"name": "torchtitan", "compile": True}))
    # a record of before a field came, and a run that spells its default out
    assert configuration_hash(spec(strategy={"tp": 1})) == configuration_hash(
        spec(strategy={"tp": 1, "token_chunks": 1})
    )
    assert configuration_hash(spec(strategy={"tp": 1})) != configuration_hash(
        spec(strategy={"tp": 1, "token_chunks": 2})
    )


def test_a_record_that_says_zero_3_of_one_fsdp_rank_is_the_run_of_today() -> None:
    """torchtitan does not wrap a shard group of one rank; older records say its nominal stage."""
    assert current_configuration_hash(spec(strategy={"zero": 3})) == current_configuration_hash(spec())
    two = {"gpus": 2, "batch": {"seq_len": 64, "micro": 1, "global": 2}}
    assert current_configuration_hash(spec(strategy={"zero": 2}, **two)) != current_configuration_hash(spec(**two))


pairs = st.tuples(
    st.sampled_from(["torchtitan", "megatron-local"]), st.text("0123456789abcdef", min_size=4, max_size=4)
)


@given(st.lists(pairs, max_size=30), st.lists(pairs, max_size=30))
def test_splits_are_halves_of_each_framework_and_never_change(
    first: list[tuple[str, str]], second: list[tuple[str, str]]
) -> None:
    splits = assign_fitting_and_judging_halves({f"a{i}": pair for i, pair in enumerate(first)}, [])
    existing = [(*pair, splits[f"a{i}"]) for i, pair in enumerate(first)]
    later = assign_fitting_and_judging_halves({f"b{i}": pair for i, pair in enumerate(second)}, existing)
    of: dict[tuple[str, str], Split] = {(name, digest): split for name, digest, split in existing}
    for i, pair in enumerate(second):
        assert later[f"b{i}"] == of.setdefault(pair, later[f"b{i}"])
    for framework in {name for name, _ in of}:
        count = Counter(split for (name, _), split in of.items() if name == framework)
        assert 0 <= count["judging"] - count["fitting"] <= 1


def test_every_record_is_whole() -> None:
    for name in measured_names():
        assert_whole(name)


def assert_whole(name: str) -> None:
    """Of a record: what every run has, ranks within their devices, and each rank of it."""
    record = measured_record(name)
    measured, run = record.measured, record.run
    assert run.id == name
    if run.gpus == 1 and measured.facts.get("local_params"):
        assert_built_as_described(record)
    assert record.environment.num_gpus == run.gpus
    assert isinstance(run.model, dict)
    told = record.environment
    assert all((told.gpu, told.cpu, told.python, told.torch, told.cuda, told.cudnn, told.nccl, told.framework))
    assert ("expandable_segments" in told.allocator) == (run.framework["allocator"] == "expandable")
    assert any(name.startswith("NCCL_") for name in told.settings)
    for one in measured.ranks:
        assert one.peak_allocated_bytes <= one.peak_reserved_bytes <= one.device_total_bytes
    if measured.outcome == "oom":
        assert measured.step_time_s is None
        assert measured.error is not None
        assert measured.ranks
        return
    assert len(measured.ranks) == run.gpus
    assert measured.step_time_s is not None
    assert len(measured.step_times_s) >= 8
    assert (measured.tokens_per_expert is not None) == ("moe" in run.model)
    for one in measured.ranks:
        device = one.peak_device_bytes
        assert device is None or one.peak_reserved_bytes <= device <= one.device_total_bytes
        assert one.whole_peak_allocated_bytes is not None
        assert one.peak_allocated_bytes <= one.whole_peak_allocated_bytes


def test_every_routed_token_is_counted() -> None:
    routed = [record for record in measured_records() if record.measured.tokens_per_expert]
    assert len(routed) >= 300
    for record in routed:
        assert_every_routed_token_is_counted(record)


def assert_every_routed_token_is_counted(record: RunRecord) -> None:
    run, counts = record.run, record.measured.tokens_per_expert
    assert counts is not None
    assert isinstance(run.model, dict)
    moe = run.model["moe"]
    s = run.strategy
    dp = run.gpus // (s["tp"] * s["cp"] * s["pp"])
    split_over = s["cp"] * (s["tp"] if s["sp"] and run.framework["name"].startswith("megatron") else 1)
    routed = run.batch.global_ // dp * run.batch.seq_len // split_over * moe["top_k"]
    for per_rank in counts:
        for layer in per_rank:
            assert len(layer) == moe["num_experts"], run.id
            assert abs(sum(layer) - routed) <= 0.01 * routed, run.id


SHORT_POSITIONS = {"te1-gpt13-20l-2k", "te1-gpt13-20l-tensorwise"}
"""Built with a row of learned positions per token of a sequence, fewer than their models have; later runs have all."""


def assert_built_as_described(record: RunRecord) -> None:
    """The framework built as many parameters as the model of a run on one GPU has."""
    model = ModelSpec.model_validate(record.run.model)
    if record.run.id in SHORT_POSITIONS:
        model = model.model_copy(update={"max_positions": record.run.batch.seq_len})
    bias_buffers = model.num_moe_layers * model.moe.num_experts if model.moe and model.moe.correction_bias else 0
    built = record.measured.facts["local_params"]
    assert built == pytest.approx(num_params(model) - bias_buffers, rel=2e-3)


@pytest.fixture(scope="module")
def expanded() -> list[ExpandedRun]:
    """What every committed record is a run of, by the fields and defaults of today."""
    return [expand_run(record.run) for record in measured_records()]


@pytest.fixture(scope="module")
def configurations(expanded: list[ExpandedRun]) -> list[str]:
    return [run.configuration_hash for run in expanded]


@pytest.fixture(scope="module")
def repeats(configurations: list[str]) -> list[list[RunRecord]]:
    """The records of each configuration."""
    same: dict[str, list[RunRecord]] = {}
    for name, one in zip(configurations, measured_records(), strict=True):
        same.setdefault(name, []).append(one)
    return list(same.values())


@pytest.fixture(scope="module")
def starts(repeats: list[list[RunRecord]]) -> list[list[RunRecord]]:
    """The records of each configuration on each kind of machine."""
    return [
        [one for one in of if one.run.hardware == hardware]
        for of in repeats for hardware in sorted({one.run.hardware for one in of})
    ]  # fmt: skip


def near_capacity(id: str) -> bool:
    """Whether a run was chosen to end close to its GPU's memory, a layer below it or above: of judging models alone."""
    return "-near-" in id


@functools.cache
def _ids_of(plan: str) -> frozenset[str]:
    return frozenset(run["id"] for run in load_yaml(MEASURED.parent / "plans" / f"{plan}.yaml")["runs"])


def to_judge_a_calibration(run_id: str) -> bool:
    """Whether a run was chosen by its half: to judge curves measured just before (nine of ten models), or two H200,
    which one judging model stood for (seven of twelve)."""
    return run_id.removesuffix("-traced") in _ids_of("te-experts-fp8") | _ids_of("te-2gpu-h200")


def only_traced(run_id: str) -> bool:
    """Whether a configuration was run to learn from alone, mostly by its trace, beside the dealt ones."""
    plans = ("te-traced", "te-traced-second", "te-gathered")
    name = run_id.removesuffix("-again").removesuffix("-warm-traced")
    return any(name in _ids_of(plan) for plan in plans)


def chosen_for_its_length(run_id: str) -> bool:
    """Whether a run of a fitting model was chosen because its step is short, to learn from its trace."""
    name = run_id.removesuffix("-again").removesuffix("-third")
    return name in _ids_of("te-short-steps") | _ids_of("te-short-traced")


def test_committed_splits_are_halves_of_each_framework(repeats: list[list[RunRecord]]) -> None:
    for framework in {r.run.framework["name"] for r in measured_records()}:
        own = [of for of in repeats if of[0].run.framework["name"] == framework]
        chosen = [
            all(near_capacity(one.run.id) or to_judge_a_calibration(one.run.id) for one in of)
            or any(only_traced(one.run.id) for one in of)
            or all(chosen_for_its_length(one.run.id) for one in of)
            for of in own
        ]
        dealt = [of for of, apart in zip(own, chosen, strict=True) if not apart]
        count = Counter(of[0].split for of in dealt)
        assert abs(count["judging"] - count["fitting"]) <= 2  # calls on two machines each round by themselves


SPLITS = {
    "2026-11-21": "e35f5a97cc7b0e68", "2026-11-22": "9787055316500d23", "2026-11-23": "ca76c2aade293e35",
    "2026-11-24": "469d41e2242b7e30",
}  # fmt: skip
"""Day of measuring to a digest of that day's records and their splits, as they were first written."""


@pytest.mark.parametrize("day", SPLITS)
def test_no_split_was_edited(day: str) -> None:
    lines = [f"{one.run.id} {one.split}" for one in measured_records() if one.source.endswith(day)]
    assert hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] == SPLITS[day]


def test_a_repeated_configuration_keeps_its_split(repeats: list[list[RunRecord]]) -> None:
    for of in repeats:
        assert len({one.split for one in of}) == 1, [one.run.id for one in of]


def flat(value: object, path: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}.{key}").items()}


def near(a: object, b: object) -> bool:
    """Two values of one field that are less than a factor of two apart."""
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool)
    return numbers and max(a, b) < 2 * min(a, b)  # type: ignore[call-overload, operator]


def test_no_two_configurations_are_almost_the_same(expanded: list[ExpandedRun]) -> None:
    """None is another but for one field that is less than a factor of two larger."""
    unsaid = (".model.name", ".model.source", ".strategy.zero")  # zero says the same of older records in other words
    fields = {}
    for run in {one.configuration_hash: one for one in expanded}.values():
        content = flat(run.run_with_full_specs().model_dump(mode="json", by_alias=True, exclude={"id", "hardware"}))
        fields[run.run.id] = {k: v for k, v in content.items() if k not in unsaid}
    assert len(fields) >= 60
    for (id, a), (other, b) in itertools.combinations(fields.items(), 2):
        differing = [k for k in a.keys() | b.keys() if a.get(k) != b.get(k)]
        assert differing, (id, other)
        apart = len(differing) > 1 or not near(a.get(differing[0]), b.get(differing[0]))
        assert apart or near_capacity(id) or near_capacity(other), (id, other, differing)


def words_of(record: RunRecord) -> set[str]:
    """What a run has of what its framework can do."""
    run, s, options = record.run, record.run.strategy, record.run.framework
    dp = run.gpus // (s["tp"] * s["cp"] * s["pp"])
    words = {name for name in ("tp", "cp", "pp", "ep", "vpp") if s[name] > 1}
    words |= {"recompute " + str(s["recompute"]).split(":")[0], "compile" if options["compile"] else "eager"}
    words |= {str(options["data_parallel"])} if dp > 1 else set()
    words |= {"tp with sp"} if s["tp"] > 1 and s["sp"] else set()
    words |= {str(s["schedule"])} if s["pp"] > 1 else set()
    words |= {"accumulation"} if s["pp"] == 1 and run.batch.global_ > dp * run.batch.micro else set()
    words |= {str(options["allocator"]), str(options["attention"]), f"{run.gpus} GPUs"}
    moe = run.model.get("moe") if isinstance(run.model, dict) else None
    if moe:
        words |= {"balanced" if run.routing.kind == "balanced" else "skewed"}
    return words


BOTH = {
    "tp", "tp with sp", "pp", "vpp", "ep", "1f1b", "interleaved", "recompute none", "recompute full", "accumulation",
    "native", "expandable", "balanced", "skewed", "sdpa", "1 GPUs", "2 GPUs", "4 GPUs",
}  # fmt: skip
COVERED = {
    "torchtitan": BOTH | {"fsdp", "hsdp", "ddp", "cp", "zbv", "recompute ops", "recompute every", "compile", "eager"},
    "megatron-local": BOTH | {"distributed-optimizer", "ddp", "recompute selective", "unfused"},
}


@pytest.mark.parametrize("framework", COVERED)
def test_the_records_cover_what_the_runners_can_do(framework: str) -> None:
    of = [one for one in measured_records() if one.run.framework["name"] == framework and one.measured.outcome == "ok"]
    assert COVERED[framework] - set().union(*(words_of(one) for one in of)) == set()


def test_six_runs_are_near_the_capacity_and_three_out_of_memory() -> None:
    """Within a tenth below it ran, by what was reserved; the others took nearly all of the device and failed."""
    share = {
        one.run.id: max(rank.peak_reserved_bytes / rank.device_total_bytes for rank in one.measured.ranks)
        for one in measured_records()
    }
    near_capacity = [one for one in measured_records() if share[one.run.id] > 0.9]
    outcomes = Counter(one.measured.outcome for one in near_capacity)
    assert outcomes["ok"] >= 3
    assert outcomes["oom"] >= 3
    failed = {one.run.id for one in measured_records() if one.measured.outcome == "oom"}
    assert failed <= {one.run.id for one in near_capacity}


DUE, DUE_DAYS = "Transformer Engine", ("2026-11-26", "2026-11-27", "2026-11-29")
"""Runs on Transformer Engine of these days have repeats due, which docs/measure.md lists; runs of others have none."""


def test_what_the_host_bounds_was_measured_three_times(starts: list[list[RunRecord]]) -> None:
    bound = [of for of in starts if any(one.measured.is_host_bound for one in of)]
    assert len(bound) >= 20
    fewer = [of for of in bound if len(of) < 3]
    due = [of for of in fewer if all(DUE in one.source and one.source.endswith(DUE_DAYS) for one in of)]
    names = {min((one.run.id for one in of), key=lambda id: (len(id), id)) for of in due}
    assert {min((one.run.id for one in of), key=len) for of in fewer} <= names
    page = (MEASURED.parents[1] / "docs" / "measure.md").read_text(encoding="utf-8")
    _, _, said = page.partition("Measured less than three times, repeats still due: ")
    listed = re.findall(r"`([^`]+)`", said.partition("\n")[0])
    assert set(listed) == names


def test_six_runs_have_a_profile_and_the_allocations_of_a_step() -> None:
    files = sorted((MEASURED.parent / "traces").glob("*.json.gz"))
    assert len({path.name.split(".")[0] for path in files}) >= 6
    for path in files:
        record = f"{path.name.split('.')[0]}.yaml"
        assert (MEASURED / record).exists() or (MEASURED.parent / "switches" / "measured" / record).exists()
        assert path.stat().st_size < 512 * 1024
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        assert len(trace["kernels_us"]) > (350 if "-2l-" in path.name else 400)  # one micro-batch of two layers has 367
        assert len(trace["allocations"]) > 400


def test_a_number_of_too_many_digits_is_said_in_plain_words(tmp_path: Path) -> None:
    text = (MEASURED / "mc1-qwen30b-2l.yaml").read_text()
    (tmp_path / "x.yaml").write_text(re.sub(r"cudnn: \d+", "cudnn: 1.0e+300", text))
    with pytest.raises(SpecError, match=r"cudnn \(1e\+300\) must be a whole number; correct it$"):
        read_record(tmp_path / "x.yaml")
