"""Estimates of whole tables: columns that add up, and what must cost more or less.

That every row costs what it costs by itself is in test_rows.py and test_rows_alone.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mofa.cost.block.routing_loads import BALANCED, RoutingLoads
from mofa.cost.breakdown import HIDDEN_COMPONENTS, LIVE_COMPONENTS, MEMORY_COMPONENTS, TIME_COMPONENTS, Breakdown
from mofa.cost.estimate import TableEstimator, estimate_table
from mofa.cost.stages import split_layers
from mofa.schedules import SCHEDULE_NAMES, SCHEDULES
from mofa.search.legality.masks import JobAndMachines, check_strategies
from mofa.search.one_plan import estimate
from mofa.search.space import combinations_table, default_space, with_first_option_set
from mofa.specs.hardware import ClusterSpec
from mofa.specs.model import ModelSpec
from mofa.specs.strategy import RecomputeSpec, StrategyTable
from mofa.specs.workload import WorkloadSpec
from tests.cost.toy import (
    alike,
    cluster,
    faster_links,
    framework,
    joined,
    llama,
    mla_moe,
    moe_llama,
    silent_host,
    silent_network,
    table,
    toy,
    windowed,
    workload,
)

FRAMEWORKS = ("megatron", "megatron-local", "torchtitan")
MODELS = {
    "dense": llama(num_layers=4, vocab=32768),
    "windowed": windowed(vocab=32768),
    "moe": moe_llama(vocab=32768),
    "mla-moe": mla_moe(vocab=32768),
}
PAIRS = [(name, kind) for name in FRAMEWORKS for kind in MODELS]
COVER = [
    ("megatron", "dense"), ("megatron", "mla-moe"), ("megatron-local", "windowed"), ("megatron-local", "moe"),
    ("torchtitan", "dense"), ("torchtitan", "mla-moe"),
]  # fmt: skip
"""Each framework with and without experts, each model at least once."""
UNEVEN = RoutingLoads({2: 1.3, 4: 1.6, 8: 2.0}, {2: 1.5, 4: 1.9, 8: 2.5})


def job_of(name: str, kind: str) -> WorkloadSpec:
    model: ModelSpec = MODELS[kind]
    if name == "torchtitan":
        model = model.model_copy(update={"num_mtp_layers": 0})
    return workload(model, seq_len=2048, global_batch=32)


@cache
def legal(name: str, kind: str, gpus: int = 16) -> StrategyTable:
    """All strategies of the default space that the framework runs, with some that recompute a layer of each chunk."""
    job, machines, spec = job_of(name, kind), cluster(gpus), framework(name)
    rows = combinations_table(with_first_option_set(default_space(job, machines, spec)), machines, spec)
    rows = rows.select_rows(check_strategies(JobAndMachines(job, machines, spec), rows).reason < 0)
    rows.recompute_layers[rows.recompute_layers < -1] = 1
    return rows


def some(name: str, kind: str, count: int, seed: int = 0) -> StrategyTable:
    rows = legal(name, kind)
    chosen = np.random.default_rng(seed).choice(len(rows), min(count, len(rows)), replace=False)
    return rows.select_rows(np.sort(chosen))


def costed(name: str, kind: str, rows: StrategyTable, machines: ClusterSpec | None = None, **options: Any) -> Breakdown:
    return estimate_table(job_of(name, kind), machines or cluster(16), framework(name), rows, **options)


def by_text(
    name: str, kind: str, *strategies: str, gpus: int = 16, machines: ClusterSpec | None = None, **options: Any
) -> Breakdown:
    machines = machines or cluster(gpus)
    rows = table(job_of(name, kind), machines, framework(name), strategies)
    return costed(name, kind, rows, machines, **options)


def of_both(name: str, kind: str, column: str, seed: int, more: int = 12) -> StrategyTable:
    """A dozen rows of which a degree is 1, and some of which it is more."""
    rows, rng = legal(name, kind), np.random.default_rng(seed)
    alone = getattr(rows, column) == 1
    return rows.select_rows(
        np.concatenate([rng.choice(np.flatnonzero(of), n, replace=False) for of, n in ((alone, 12), (~alone, more))])
    )


@cache
def costed_once(name: str, kind: str) -> Breakdown:
    """The costs of 40 rows, for all tests that look at nothing else."""
    return costed(name, kind, some(name, kind, 40, seed=1))


def time_of(found: Breakdown, name: str) -> np.ndarray[Any, Any]:
    return found.exposed_s[TIME_COMPONENTS.index(name)]


def bytes_of(found: Breakdown, *names: str) -> np.ndarray[Any, Any]:
    return found.memory_bytes[[MEMORY_COMPONENTS.index(name) for name in names]].sum(axis=0)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    """Rows of other pipelines share the blocks of these, and nothing else: not their data-parallel groups either."""
    texts = [f"pp={pp} recompute=none" for pp in ((1, 2) if name == "torchtitan" else (1, 2, 4))]
    together = by_text(name, "dense", *texts)
    for i, text in enumerate(texts):
        alone = by_text(name, "dense", text)
        assert together.step_s[i] == pytest.approx(alone.step_s[0], rel=1e-9)
        assert together.device_bytes[i] == pytest.approx(alone.device_bytes[0], rel=1e-9)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_columns_add_up(name: str, kind: str) -> None:
    found = costed_once(name, kind)
    rows = found.table
    assert np.all(np.isfinite(found.step_s)) and np.all(found.step_s > 0)
    np.testing.assert_allclose(found.exposed_s.sum(axis=0), found.step_s, rtol=1e-9)
    np.testing.assert_allclose(found.memory_bytes.sum(axis=0), found.device_bytes, rtol=1e-9)
    live = found.memory_bytes[: len(LIVE_COMPONENTS)]
    np.testing.assert_allclose(live.sum(axis=0), found.allocated_bytes, rtol=1e-9)
    np.testing.assert_allclose(
        bytes_of(found, "allocator_slack"), found.reserved_bytes - found.allocated_bytes, atol=1.0
    )
    assert np.all(found.exposed_s >= -1e-12) and np.all(found.hidden_s >= 0) and np.all(found.memory_bytes >= -1e-3)
    assert np.all(found.allocated_bytes <= found.reserved_bytes) and np.all(found.reserved_bytes <= found.device_bytes)
    assert np.all((found.slowest_stage < rows.pp) & (found.fullest_stage < rows.pp))
    names = [found.instant_names[i] for i in found.instant]
    assert all(
        " of the " in n or n in ("loss forward", "loss backward", "embedding backward", "optimizer step") for n in names
    )


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_what_is_not_there_costs_nothing(name: str, kind: str) -> None:
    found = costed_once(name, kind)
    rows = found.table
    alone = {"cp": rows.cp == 1, "pp": rows.pp == 1, "ep": rows.ep * rows.etp == 1, "bubble": rows.pp == 1}
    if MODELS[kind].moe is None:
        alone["ep"] = rows.tp > 0
        assert not np.any(time_of(found, "grouped_gemm"))
    alone["tp"] = (rows.tp == 1) & (rows.etp == 1)
    for component, where in alone.items():
        assert not np.any(time_of(found, component)[where]), component
        if component in HIDDEN_COMPONENTS:
            assert not np.any(found.hidden_s[HIDDEN_COMPONENTS.index(component)][where]), component
    plain = np.array([spec.kind == "none" for spec in rows.recompute_modes])[rows.recompute]
    assert not np.any(time_of(found, "recompute")[plain])


def pairs_by_mode(name: str, kind: str, first: str, second: str) -> tuple[StrategyTable, StrategyTable]:
    """The same strategies under two kinds of recomputation."""
    rows = of_both(name, kind, "pp", seed=3)
    modes = (RecomputeSpec.parse(first), RecomputeSpec.parse(second))
    layers = np.full(len(rows), -1)
    fields = {**vars(rows), "recompute_modes": modes, "recompute_layers": layers}
    return tuple(StrategyTable(**{**fields, "recompute": np.full(len(rows), i)}) for i in (0, 1))  # type: ignore[return-value]


@pytest.mark.parametrize(("name", "kind"), COVER)
def test_recomputation_saves_memory_and_costs_time(name: str, kind: str) -> None:
    none, full = (costed(name, kind, rows) for rows in pairs_by_mode(name, kind, "none", "full"))
    assert np.all(full.step_s > none.step_s)
    assert np.all(full.hardware_flops > none.hardware_flops)
    # of several stages another may be the fullest, which is up to what is reserved
    alone = none.table.pp == 1
    assert np.all(full.allocated_bytes[alone] <= none.allocated_bytes[alone] * (1 + 1e-9)) and alone.sum() == 12
    assert np.mean(full.allocated_bytes) < np.mean(none.allocated_bytes)


@pytest.mark.parametrize("kind", MODELS)
def test_each_recomputed_layer_saves_memory_and_costs_time(kind: str) -> None:
    found = by_text(
        "megatron",
        kind,
        *(f"dp=16 micro_batch=2 recompute={r}" for r in ("none", "full:1", "full:2", "full:3", "full")),
    )
    assert np.all(np.diff(found.step_s) > 0)
    assert np.all(np.diff(found.allocated_bytes) <= 0)


def test_selective_recomputation_lies_between() -> None:
    found = by_text("megatron-local", "dense", *(f"dp=16 recompute={r}" for r in ("none", "selective", "full")))
    assert np.all(np.diff(found.step_s) > 0)
    assert np.all(np.diff(found.hardware_flops) > 0)


# The host's lead of a phase is that of the second of two repetitions, which is not quite monotone: 0.5 % are allowed.
HOSTS = {"silent host": (silent_host(toy(cluster(16))), 1e-9), "host": (toy(cluster(16)), 5e-3)}
HOSTED = [(name, second, host) for name in FRAMEWORKS for second, host in ((False, "silent host"), (True, "host"))]
HOSTED[2:4] = [("megatron-local", True, "silent host"), ("megatron-local", False, "host")]
"""Framework, whether the second of two models, host: each two of them meet."""


@pytest.mark.parametrize(("name", "second", "host"), HOSTED)
def test_more_bandwidth_never_slows(name: str, second: bool, host: str) -> None:
    kind, (machines, tolerance) = ("windowed", "mla-moe")[second], HOSTS[host]
    rows = some(name, kind, 20, seed=4)
    slow, fast, free = (
        costed(name, kind, rows, m)
        for m in (faster_links(machines, 1.0), faster_links(machines, 2.0), silent_network(machines))
    )
    assert np.all(fast.step_s <= slow.step_s * (1 + tolerance))
    assert np.all(free.step_s <= fast.step_s * (1 + tolerance))
    np.testing.assert_allclose(fast.device_bytes, slow.device_bytes, rtol=1e-12)


def _has_layers_everywhere(rows: StrategyTable, model: ModelSpec, name: str) -> NDArray[np.bool_]:
    """Whether every rank of each row has a layer. (n,)"""
    placements = [SCHEDULES[SCHEDULE_NAMES[i]].placement for i in rows.schedule.tolist()]
    degrees = zip(rows.pp.tolist(), rows.vpp.tolist(), placements, strict=True)
    counts = [split_layers(model, pp, vpp, name, placement).layer_counts for pp, vpp, placement in degrees]
    return np.array([count.sum(axis=(0, 2)).min() > 0 for count in counts])


@pytest.mark.parametrize(("name", "second", "host"), HOSTED)
def test_uneven_routing_needs_more_memory_and_time(name: str, second: bool, host: str) -> None:
    kind, (machines, tolerance) = ("moe", "mla-moe")[second], HOSTS[host]
    rows = of_both(name, kind, "ep", seed=5, more=20)
    even, uneven = (costed(name, kind, rows, machines, loads=loads) for loads in (BALANCED, UNEVEN))
    touched = rows.ep > 1
    assert touched.sum() == 20
    assert np.all(uneven.step_s[touched] >= even.step_s[touched] * (1 - tolerance))
    if tolerance < 1e-6:
        assert np.all(uneven.step_s[touched] > even.step_s[touched])
    assert np.all(uneven.allocated_bytes[touched] >= even.allocated_bytes[touched] * (1 - 1e-12))
    everywhere = touched & _has_layers_everywhere(rows, job_of(name, kind).model, name)  # an end alone has no experts
    keeps = np.array(["moe" not in mode.modules for mode in rows.recompute_modes])[rows.recompute]
    everywhere &= keeps  # what experts make again is not held; of others the fullest moment may be the head's
    assert np.mean(uneven.allocated_bytes[everywhere] > even.allocated_bytes[everywhere]) > 0.25
    np.testing.assert_allclose(uneven.step_s[~touched], even.step_s[~touched], rtol=1e-12)


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("degrees", ["", "tp=2", "pp=2", "tp=2 pp=2"])
def test_more_data_parallelism_never_holds_more(name: str, kind: str, degrees: str) -> None:
    """Parameters and states of a rank fall, or stay, as dp grows."""
    held = []
    for gpus in (8, 16):
        found = by_text(name, kind, f"{degrees} recompute=none", gpus=gpus)
        held.append(float(bytes_of(found, "parameters", "optimizer_states")[0]))
    assert np.all(np.diff(held) < 0)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_twice_the_gpus_for_twice_the_batch(name: str) -> None:
    """Weak scaling of GPUs that are alike: what computes stays, only communication and the optimizer's share change."""
    spec = framework(name)
    found = []
    for gpus in (16, 32):
        job = workload(MODELS["dense"], seq_len=2048, global_batch=2 * gpus)
        machines = alike(cluster(gpus))
        estimator = TableEstimator(job, machines, spec, table(job, machines, spec, ["tp=2 recompute=none"]))
        estimator.rests = False  # an optimizer of half the time gives back less of the clock
        found.append(estimator.breakdown())
    one, two = found
    for component in ("gemm", "attention", "memory_bound", "recompute"):
        np.testing.assert_allclose(time_of(two, component), time_of(one, component), rtol=1e-9)
    np.testing.assert_allclose(two.hardware_flops, 2 * one.hardware_flops, rtol=1e-9)
    outside = [TIME_COMPONENTS.index(n) for n in ("tp", "dp", "optimizer", "host_idle")]
    change = (two.exposed_s - one.exposed_s)[outside].sum()
    np.testing.assert_allclose(two.step_s - one.step_s, change, atol=1e-12)


def test_fp8_products_are_faster() -> None:
    spec, machines = framework("megatron"), toy(cluster(8))
    jobs = [workload(MODELS["dense"], precision={"gemm": f}, global_batch=8, seq_len=8192) for f in ("bf16", "fp8")]
    jobs = [j.model_copy(update={"model": j.model.model_copy(update={"hidden": 4096})}) for j in jobs]
    slow, fast = (estimate_table(j, machines, spec, table(j, machines, spec, ["dp=8"])) for j in jobs)
    assert time_of(fast, "gemm")[0] < time_of(slow, "gemm")[0]
    np.testing.assert_allclose(time_of(fast, "attention"), time_of(slow, "attention"), rtol=1e-9)


@pytest.mark.parametrize("name", ["megatron", "megatron-local"])
def test_sequence_parallelism_saves_memory(name: str) -> None:
    for tp in (2, 4):
        found = by_text(name, "dense", f"tp={tp} sp=false micro_batch=2", f"tp={tp} sp=true micro_batch=2")
        assert found.allocated_bytes[1] < found.allocated_bytes[0]
        assert bytes_of(found, "activations")[1] < bytes_of(found, "activations")[0]


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("kind", MODELS)
def test_larger_micro_batches_hold_more(name: str, kind: str) -> None:
    for rest in ("dp=8 tp=2", "dp=4 tp=2 pp=2"):
        found = by_text(name, kind, *(f"{rest} recompute=none micro_batch={b}" for b in (1, 2, 4)))
        assert np.all(np.diff(found.allocated_bytes) > 0)


@pytest.mark.parametrize("name", ["megatron", "megatron-local", "torchtitan"])
def test_later_stages_hold_fewer_micro_batches(name: str) -> None:
    pp = 2 if name == "torchtitan" else 4
    found = by_text(name, "dense", f"pp={pp} tp=4 recompute=none", detail=True)
    assert found.detail is not None
    flight = found.detail.in_flight[0]
    assert flight.tolist() == [len(flight) - r for r in range(len(flight))]
    assert found.device_bytes[0] == found.detail.device_bytes[0].max()
    np.testing.assert_allclose(found.detail.components_bytes.sum(axis=0), found.detail.device_bytes, rtol=1e-9)


@pytest.mark.parametrize("family", ["attention", "memory_bound", "gemm"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_dropping_a_family_loses_exactly_its_seconds(name: str, family: str) -> None:
    """One GPU and a host that takes no time: nothing overlaps. Of memory nothing is gained but what ops held."""
    machines, job = silent_host(toy(cluster(1))), job_of(name, "dense")
    facts = framework(name, allocator="expandable")  # which leaves no rests, that depend on what ops freed
    rows = table(job, machines, facts, ["micro_batch=2 recompute=none"])
    whole = estimate_table(job, machines, facts, rows)
    less = estimate_table(job, machines, facts, rows, drop=frozenset({family}))
    assert time_of(less, family)[0] == 0
    others = [i for i, n in enumerate(TIME_COMPONENTS) if n != family]
    np.testing.assert_allclose(less.exposed_s[others, 0], whole.exposed_s[others, 0], rtol=1e-9, atol=1e-12)
    assert float(whole.step_s[0] - less.step_s[0]) == pytest.approx(float(time_of(whole, family)[0]), rel=1e-9)
    assert less.allocated_bytes[0] <= whole.allocated_bytes[0]
    static = ("parameters", "optimizer_states")
    assert bytes_of(less, *static)[0] == bytes_of(whole, *static)[0]


def test_dropping_communication_loses_exactly_what_it_exposed() -> None:
    """Megatron's tensor parallelism waits for every collective: without them the step is shorter by their seconds."""
    machines = silent_host(toy(cluster(8)))
    for kind, strategy, family in (("dense", "tp=4 dp=2", "tp"), ("moe", "tp=1 ep=8 etp=1", "ep")):
        whole = by_text("megatron", kind, strategy, machines=machines)
        less = by_text("megatron", kind, strategy, machines=machines, drop=frozenset({family}))
        assert time_of(whole, family)[0] > 0
        assert float(whole.step_s[0] - less.step_s[0]) == pytest.approx(float(time_of(whole, family)[0]), rel=1e-6)


def test_rows_of_an_estimator_are_those_of_its_table() -> None:
    """Any rows, in any order, with other numbers of recomputed layers; progress counts to the end."""
    job, machines, spec = job_of("megatron", "moe"), cluster(16), framework("megatron")
    rows = some("megatron", "moe", 50)
    estimator = TableEstimator(job, machines, spec, rows)
    whole, which, told = estimator.breakdown(), np.array([7, 3, 3, 40]), list[int]()
    part = estimator.breakdown(which, progress=told.append)
    np.testing.assert_allclose(part.step_s, whole.step_s[which], rtol=1e-12)
    np.testing.assert_allclose(part.device_bytes, whole.device_bytes[which], rtol=1e-12)
    assert told[-1] == 4


def test_joined_tables_keep_their_modes() -> None:
    """The helper of these tests, on which the others rest."""
    job, machines, spec = job_of("megatron", "dense"), cluster(16), framework("megatron")
    texts = ["recompute=full:2", "recompute=selective", "recompute=full"]
    rows = table(job, machines, spec, texts)
    assert [f"recompute={rows.row(i, 'megatron').recompute}" for i in range(3)] == texts
    assert len(joined([rows, rows])) == 6


@pytest.mark.parametrize(("name", "kind"), COVER)
def test_plans(name: str, kind: str) -> None:
    """Fractions of provenance sum to 1, hardware FLOPs are no fewer than the model's, parts sum.

    What is recomputed meets each of the degrees with a model of each framework."""
    job, machines, spec = job_of(name, kind), cluster(16), framework(name)
    for recompute in ("none", "full"):
        for degrees in ("dp=16", "tp=2 pp=2"):
            if ((recompute == "full") == (degrees == "dp=16")) == (MODELS[kind].moe is None):
                continue
            plan = estimate(job, machines, f"{degrees} recompute={recompute}", framework=spec)
            assert sum(plan.provenance.values()) == pytest.approx(1)
            assert all(0 <= v <= 1 for v in plan.provenance.values())
            assert plan.hfu >= plan.mfu
            assert (plan.hfu > plan.mfu) == (recompute == "full")
            assert sum(plan.time.exposed.values()) == pytest.approx(plan.step_s)
            assert sum(plan.memory.by_component.values()) == pytest.approx(plan.memory.device_bytes)
            assert plan.tokens_per_s_per_gpu == pytest.approx(32 * 2048 / plan.step_s / 16)
            full = estimate(
                job, machines, f"{degrees} recompute={recompute}", framework=spec, flops_convention="full",
                explain=False, over_time=False,
            )  # fmt: skip
            assert full.mfu > plan.mfu
            assert full.step_s == plan.step_s
            assert full.hfu >= full.mfu


@pytest.mark.parametrize("kind", MODELS)
def test_hardware_flops_without_recomputation_are_near_the_models(kind: str) -> None:
    """A dense Megatron step runs what the mathematics needs and half as much attention again (five products for four
    in the backward pass)."""
    from mofa.cost.model_flops import model_flops_per_token

    job = job_of("megatron", kind)
    found = by_text("megatron", kind, "dp=16")
    model = model_flops_per_token(job.model, 2048) * 32 * 2048
    assert 0.97 * model < found.hardware_flops[0] < 1.25 * model
