"""A step on the clocks: sums, caching, by hand on a toy GPU's times, and what happens at the edges of a step."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest

import mofa
from mofa.cost.block.routing_loads import BALANCED, RoutingLoads
from mofa.cost.breakdown import TIME_COMPONENTS
from mofa.cost.estimate import TableEstimator
from mofa.cost.step_time.micro_batch import micro_batch_passes
from mofa.replay.rank.from_estimator import gathered_row_of_strategy
from mofa.replay.time.extrapolate import insert_rounds
from mofa.replay.time.kernel_runs import (
    FAMILY,
    NOW,
    CrossStreamTensors,
    HostSyncStep,
    SideStreamOp,
    join_kernels_to_steps,
    one_kernel_step,
    resolve_tape,
)
from mofa.replay.time.step import replay_step_time
from mofa.replay.time.stream_clocks import StreamClocks
from mofa.schedules import Action, Order, computation_order_of
from mofa.schedules.order import Kind
from mofa.schedules.order_check import OrderError
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.one_strategy import checked_strategy_row

CASES = (
    ("llama3-8b", "h100-hgx", 8, "tp=2 pp=2 dp=2 micro_batch=1 recompute=selective", "megatron", 32),
    ("llama3-8b", "h100-hgx", 16, "tp=2 pp=2 vpp=4 dp=4 micro_batch=1", "megatron", 64),
    ("llama3-8b", "h100-hgx", 8, "pp=2 vpp=2 dp=4 micro_batch=1", "torchtitan", 32),
    ("llama3-8b", "h100-hgx", 8, "pp=4 vpp=2 dp=2 schedule=zbv micro_batch=1 recompute=none", "torchtitan", 16),
    ("llama3-8b", "h100-hgx", 8, "dp=8 micro_batch=1", "torchtitan", 32),
    ("mixtral-8x7b", "h100-hgx", 32, "pp=4 ep=8 dp=8 micro_batch=1 recompute=full", "megatron", 64),
    ("deepseek-v2-lite", "h100-hgx", 8, "ep=4 dp=8 micro_batch=1", "torchtitan", 32),
)


@lru_cache
def estimator(case: tuple[str, str, int, str, str, int], **changes: object) -> TableEstimator:
    name, cluster, gpus, strategy, framework, batch = case
    workload = mofa.load_workload(name, global_batch=batch)
    machines = mofa.load_cluster(cluster, gpus)
    facts = mofa.load_framework(framework)
    row = checked_strategy_row(workload, machines, facts, strategy)
    return TableEstimator(workload, machines, facts, row, routing_loads_by_ep(workload, row))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[4]} {c[3]}")
def test_every_ranks_parts_sum_to_the_step(case: tuple[str, str, int, str, str, int]) -> None:
    played = replay_step_time(estimator(case))
    for rank, idle, spans in zip(played.ranks, played.idle, played.spans, strict=True):
        assert set(rank) == set(TIME_COMPONENTS)
        assert min(rank.values()) >= 0.0
        assert sum(rank.values()) == pytest.approx(played.step_s, rel=1e-9)
        assert min(idle.values()) >= -1e-12
        # what a rank waits for is part of its exposed communication, host and bubble
        waits = ("host_idle", "tp", "cp", "ep", "pp", "dp", "bubble")
        assert sum(idle.values()) <= sum(rank[name] for name in waits) + 1e-9
        ends = [span.end_s for span in spans]
        starts = [span.start_s for span in spans]
        assert all(a <= b + 1e-12 for a, b in zip(ends, starts[1:], strict=False))
        assert spans[-1].kind == "O"
    assert played.exposed == played.ranks[played.slowest]
    assert played.exposed["bubble"] == min(rank["bubble"] for rank in played.ranks)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[4]} {c[3]}")
def test_looking_up_changes_nothing(case: tuple[str, str, int, str, str, int]) -> None:
    """Every computation played in full, op by op, against those looked up that begin like an earlier one."""
    fast, full = replay_step_time(estimator(case)), replay_step_time(estimator(case), cached=False)
    assert fast.step_s == pytest.approx(full.step_s, rel=1e-8)
    for a, b in zip(fast.ranks, full.ranks, strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-7)
    for mine, other in zip(fast.spans, full.spans, strict=True):
        np.testing.assert_allclose([s.end_s for s in mine], [s.end_s for s in other], rtol=1e-8)


LONG = (
    ("llama3-8b", "h100-hgx", 8, "pp=1 dp=8 micro_batch=1", "megatron", 256),
    ("llama3-8b", "h200-hgx", 8, "pp=4 dp=2 micro_batch=1 recompute=full", "torchtitan", 256),
    ("mixtral-8x7b", "h100-hgx", 32, "tp=2 sp=true pp=4 ep=4 micro_batch=1", "megatron", 256),
    ("deepseek-v2-lite", "h100-hgx", 8, "pp=2 ep=4 micro_batch=1 recompute=full", "torchtitan", 256),
)


@pytest.mark.parametrize("case", LONG, ids=lambda c: f"{c[0]} {c[4]} {c[3]}")
def test_a_step_of_many_micro_batches_is_one_of_fewer_with_rounds_put_in(
    case: tuple[str, str, int, str, str, int],
) -> None:
    """Every computation, part and cause of idling, against the step played whole."""
    with mock.patch("mofa.replay.time.step.insert_rounds", side_effect=insert_rounds) as lengthened:
        short = replay_step_time(estimator(case), detail=False)
        assert lengthened.call_args.args[0].num_played < 32
        count = lengthened.call_count
        whole = replay_step_time(estimator(case), detail=True)
        assert lengthened.call_count == count
    assert short.step_s == pytest.approx(whole.step_s, rel=1e-12)
    assert short.slowest == whole.slowest
    for mine, other in zip((*short.ranks, *short.idle), (*whole.ranks, *whole.idle), strict=True):
        assert mine == pytest.approx(other, rel=1e-9, abs=1e-12 * whole.step_s)
    for mine_, other_ in zip(short.spans, whole.spans, strict=True):
        assert [span[:3] for span in mine_] == [span[:3] for span in other_]
        np.testing.assert_allclose([s[3:] for s in mine_], [s[3:] for s in other_], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("framework", "off"), [("torchtitan", 1e-12), ("megatron", 3e-4)])
def test_long_interleaved_steps_are_lengthened(framework: str, off: float) -> None:
    """Megatron's ends launch receives ahead, none in the last tenth of the rounds, by which computing loses a little
    less than the rounds put in say."""
    case = ("llama3-8b", "h100-hgx", 8, "pp=2 vpp=4 dp=4 micro_batch=1 recompute=full", framework, 256)
    watched = mock.patch("mofa.replay.time.step.insert_rounds", side_effect=insert_rounds)
    with mock.patch("mofa.replay.time.extrapolate.LONG", 0), watched as lengthened:
        short = replay_step_time(estimator(case), detail=False)
        assert lengthened.call_args.args[0].num_played < 64
    whole = replay_step_time(estimator(case), detail=True)
    assert short.step_s == pytest.approx(whole.step_s, rel=off) and short.slowest == whole.slowest
    for mine, other in zip((*short.ranks, *short.idle), (*whole.ranks, *whole.idle), strict=True):
        assert mine == pytest.approx(other, rel=1e-9, abs=off * whole.step_s)
    for mine_, other_ in zip(short.spans, whole.spans, strict=True):
        assert [span[:3] for span in mine_] == [span[:3] for span in other_]
        np.testing.assert_allclose([s[3:] for s in mine_], [s[3:] for s in other_], atol=off * whole.step_s)


def test_rounds_that_take_longer_each_are_not_put_in() -> None:
    """Where the first try is not alike, more micro-batches are played, and all where those are not either."""
    case = LONG[0]
    with mock.patch("mofa.replay.time.extrapolate._alike", return_value=False) as alike:
        assert replay_step_time(estimator(case), detail=False).step_s == replay_step_time(estimator(case)).step_s
    assert alike.call_count == 2


@pytest.mark.parametrize("case", CASES[:5], ids=lambda c: f"{c[0]} {c[4]} {c[3]}")
def test_watching_ops_changes_nothing(case: tuple[str, str, int, str, str, int]) -> None:
    """Ops one at a time take what runs of ops take, and fill the computations that they are of."""
    plain = replay_step_time(estimator(case))
    watched = replay_step_time(estimator(case), watched=frozenset({(0, 1)}))
    assert watched.step_s == pytest.approx(plain.step_s, rel=1e-9)
    (ops, *_), spans = watched.ops, [s for s in watched.spans[0] if s.micro_batch == 1 and s.kind != "O"]
    computed = [op for op in ops if op.stream == "compute"]
    assert computed
    for op in computed:
        assert any(s.start_s - 1e-9 <= op.start_s <= op.end_s <= s.end_s + 1e-9 for s in spans)
    for stream in {op.stream for op in ops} - {"wait"}:
        mine = sorted((op.start_s, op.end_s) for op in ops if op.stream == stream)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine)), stream


def test_one_stage_is_its_micro_batches_and_the_optimizer() -> None:
    """One GPU: nothing to wait for, so the step is what the closed form adds up, but for the first op's issue."""
    case = ("llama3-8b", "h200-hgx", 1, "micro_batch=1 recompute=full", "megatron", 4)
    played, closed = replay_step_time(estimator(case)), estimator(case).breakdown()
    assert played.step_s == pytest.approx(float(closed.step_s[0]), rel=1e-3)
    for name in ("gemm", "attention", "memory_bound", "recompute", "optimizer"):
        assert played.exposed[name] == pytest.approx(float(closed.exposed_s[TIME_COMPONENTS.index(name), 0]), rel=1e-9)
    assert played.exposed["bubble"] == 0.0


def test_a_hosts_lead_lasts_until_it_is_used() -> None:
    """PyTorch's interleaved pipeline under a host two and a half times as slow: the first rank of those that issue most
    waits for its inputs in the beginning, and what its host issues meanwhile it need not wait for later. So the step is
    little more than all that is issued there: it would be 4 % more if each computation forgot what it has no use for.
    """
    workload = mofa.load_workload("llama3-8b", global_batch=64)
    machines, facts = mofa.load_cluster("h100-hgx", 32).with_host_speed(8e-6), mofa.load_framework("torchtitan")
    row = checked_strategy_row(workload, machines, facts, "tp=2 pp=8 vpp=2 cp=2 micro_batch=1")
    one = TableEstimator(workload, machines, facts, row)
    late = micro_batch_passes(gathered_row_of_strategy(one)).host_bound
    assert late is not None
    issued = (late.forward.host_s + late.backward.host_s).sum(axis=2).max() * 64
    step_s = replay_step_time(one, detail=False).step_s
    assert 1.0 < step_s / issued < 1.02


def test_blocking_launches_are_issued_run_and_waited_for_in_turn() -> None:
    """A block of Megatron of 2022 played from rest takes the sum of its ops, their issue and 12.4 us a launch, with its
    tensor-parallel sums, which otherwise hide the issue of what follows; so say the closed forms as well."""
    workload = mofa.load_workload("llama3-8b", global_batch=8)
    machines = mofa.load_cluster("h100-hgx", 8)
    facts = mofa.load_framework("megatron-2022", overrides={"launch_blocking": True})
    part = (
        TableEstimator(workload, machines, facts, checked_strategy_row(workload, machines, facts, "tp=8"))
        .parts[0]
        .costs
    )
    sync_s = machines.sync_s
    (label,) = [name for name in part.tapes if name.startswith("dense")]
    tape = part.tapes[label].forward
    drafted = resolve_tape("forward", tape, part.machine)
    clock = StreamClocks(sync_s)
    clock.play_tape(join_kernels_to_steps(drafted, CrossStreamTensors.from_tapes([drafted])), "")
    launches = sum(float(np.asarray(op.launches)) for op in tape.ops if op.work is not None and bool(op.present))
    busy = sum(line.seconds + line.issue for line in drafted.lines)
    assert clock.host == pytest.approx(busy + launches * sync_s, rel=1e-9)
    assert float(next(iter(part.blocks.values()))[0].forward.total_s[0]) == pytest.approx(clock.host, rel=1e-9)


def test_jitter_is_drawn_from_its_seed_and_only_slows() -> None:
    case = CASES[0]
    plain = replay_step_time(estimator(case)).step_s
    some, again, other = (replay_step_time(estimator(case), jitter=0.1, seed=seed).step_s for seed in (1, 1, 2))
    assert some == again != other
    # computations keep their mean; pipelines wait for the slower of two
    assert plain < some < 1.2 * plain


def test_micro_batches_of_other_loads() -> None:
    """Half of the micro-batches under a heavier load: between all balanced and all heavy."""
    name, cluster, gpus, strategy, framework, batch = CASES[5]
    workload = mofa.load_workload(name, global_batch=batch)
    machines, facts = mofa.load_cluster(cluster, gpus), mofa.load_framework(framework)
    row = checked_strategy_row(workload, machines, facts, strategy)
    light = TableEstimator(workload, machines, facts, row, BALANCED)
    heavy = TableEstimator(workload, machines, facts, row, RoutingLoads({8: 2.0}, {8: 2.0}))
    one, two = replay_step_time(light).step_s, replay_step_time(heavy).step_s
    mixed = replay_step_time(light, variants=(light, heavy)).step_s
    assert one < mixed < two
    assert replay_step_time(light, variants=(light, light)).step_s == pytest.approx(one, rel=1e-9)
    assert replay_step_time(light, variants=(heavy,)).step_s == pytest.approx(two, rel=1e-9)


def test_an_order_of_ones_own() -> None:
    """All forwards first on both ranks: as GPipe, not sooner than 1F1B but for its host behind exchanges, which is
    little beside large micro-batches; with a cycle, an error that says who waits."""
    case = ("llama3-8b", "h100-hgx", 8, "tp=4 pp=2 micro_batch=4", "megatron", 32)
    ours = replay_step_time(estimator(case), order=computation_order_of("gpipe", "megatron", 2, 1, 8))
    assert ours.step_s >= replay_step_time(estimator(case)).step_s * (1 - 1e-3)

    def acts(stage: int, first: Kind) -> tuple[Action, ...]:
        rest: tuple[Kind, ...] = ("F", "B") if first == "F" else ("B", "F")
        return tuple(Action(kind, stage, i) for i in range(8) for kind in rest)

    with pytest.raises(OrderError, match="B of stage 1, micro-batch 0 waits for F of stage 1, micro-batch 0"):
        replay_step_time(estimator(case), order=Order(2, 1, 8, (acts(0, "F"), acts(1, "B"))))
    late = (acts(0, "F")[::-1], acts(1, "F"))
    with pytest.raises(OrderError, match="waits for F of stage 0"):
        replay_step_time(estimator(case), order=Order(2, 1, 8, late))
    with pytest.raises(OrderError, match="4 micro-batches, the strategy 2, 1 and 8"):
        replay_step_time(estimator(case), order=computation_order_of("1f1b", "megatron", 2, 1, 4))


def test_the_host_waits_for_what_it_reads_of_another_stream_alone() -> None:
    """The counts came at 3 s, computing is under way until 100 s, a wait takes 20 s; what is over long since, none."""
    clock = StreamClocks(sync_s=20.0, compute=100.0, host=2.0, ready={"counts": (3.0, -1)})
    clock.play_steps([HostSyncStep("sync", 0.5, ("counts",))])
    assert clock.host == 23.5
    clock.play_steps([HostSyncStep("sync", 0.0, ("gone",))])
    assert clock.host == 43.5
    clock.play_steps([HostSyncStep("sync", 0.0)])
    assert clock.host == 120.0


@pytest.mark.parametrize(("gather_s", "reduced_s"), [(3.0, 17.0), (6.0, 20.0)])
def test_what_computing_launched_is_launched_later_where_a_gather_slowed_it(gather_s: float, reduced_s: float) -> None:
    """Computing of 10 s ends in two reductions of 4 and 2 s. Then comes a gather that began at 2 s and leaves computing
    nothing: by as much later computing launches both. The second queues behind the first."""
    clock = StreamClocks(sync_s=0.0, streams={"fsdp_gather": 2.0})
    reductions = [
        SideStreamOp(name, seconds, 0.0, FAMILY["dp"], "fsdp_reduce", (NOW,), (name,), 0.5)
        for name, seconds in (("first", 4.0), ("second", 2.0))
    ]
    gather = SideStreamOp("gather", gather_s, 0.0, FAMILY["dp"], "fsdp_gather", (), ("gathered",), 1.0)
    clock.play_steps([one_kernel_step("product", 10.0, 0.0, "gemm", ()), *reductions])
    assert (clock.compute, clock.ready["first"][0], clock.ready["second"][0]) == (10.0, 14.0, 16.0)
    clock.play_steps([gather])
    lost_s = reduced_s - 14.0
    assert clock.compute == 10.0 + lost_s
    assert (clock.ready["first"][0], clock.ready["second"][0]) == (reduced_s, reduced_s + 2.0)
    assert clock.streams["fsdp_reduce"] == reduced_s + 2.0


def test_a_reduction_that_waited_longer_for_its_stream_is_not_moved() -> None:
    """Its stream is taken until 20 s; that computing launches it at 13 s and not at 10 s changes nothing."""
    clock = StreamClocks(sync_s=0.0, streams={"fsdp_gather": 2.0, "fsdp_reduce": 20.0})
    reduction = SideStreamOp("reduction", 4.0, 0.0, FAMILY["dp"], "fsdp_reduce", (NOW,), ("reduced",), 0.5)
    gather = SideStreamOp("gather", 3.0, 0.0, FAMILY["dp"], "fsdp_gather", (), ("gathered",), 1.0)
    clock.play_steps([one_kernel_step("product", 10.0, 0.0, "gemm", ()), reduction, gather])
    assert (clock.compute, clock.ready["reduced"][0]) == (13.0, 24.0)
