"""A layer's forward beside another's backward: its parts, their turns, and what it saves and costs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from mofa.blocks.build import BlockTapes
from mofa.blocks.combined_passes import (
    BACKWARD_PARTS,
    ISSUED,
    PASS_ORDER,
    backward_ops_by_part,
    combined_tape,
    forward_ops_by_part,
)
from mofa.blocks.op import COMPUTING_FAMILIES, EXPERT_STREAM, Op
from mofa.blocks.work import Collective
from mofa.cost.block.combined_memory import peak_bytes_of_layer_pair
from mofa.cost.block.host_issue import issue_seconds_array
from mofa.cost.block.liveness import block_memory
from mofa.cost.block.tape_clock import EXPOSED
from mofa.cost.breakdown import HIDDEN_COMPONENTS, TIME_COMPONENTS
from mofa.cost.estimate import TableEstimator
from mofa.search.job_setup import routing_loads_by_ep
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.base import Fact
from mofa.specs.overrides import parse_strategy
from tests.blocks.small import build, context, framework, llama
from tests.cost.toy import cluster, fast_hosts, moe_llama, with_host, workload

MOE = llama(moe={"num_experts": 8, "top_k": 2, "expert_hidden": 256, "shared_hidden": 256})


def layer(*, moe: bool = True, delays: bool = False, overlap: str = "combined", **options: Any) -> BlockTapes:
    spec = framework("megatron", expert_overlap=overlap, delay_wgrad=delays, **options)
    return build(context(MOE, spec, ep=4), moe=moe)


def names(ops: tuple[Op, ...]) -> list[str]:
    return [op.name for op in ops if op.work is not None]


@pytest.mark.parametrize("delays", [False, True])
def test_parts_are_all_of_a_tape(delays: bool) -> None:
    for moe in (True, False):
        tapes = layer(moe=moe, delays=delays)
        forward, backward = (
            forward_ops_by_part(tapes.forward),
            backward_ops_by_part(tapes.forward, tapes.backward, delays=delays),
        )
        assert tuple(op for ops in forward.values() for op in ops) == tapes.forward.ops
        cut = [op.name for ops in backward.values() for op in ops]
        assert sorted(cut) == sorted(op.name for op in tapes.backward.ops)
    assert set(PASS_ORDER) == set(ISSUED) and len(PASS_ORDER) == len(ISSUED)


def test_callables_are_cut_as_megatron_cuts_them() -> None:
    """fine_grained_callables.py: router, shared experts and permutation with attention, sorting with the experts, what
    adds rows up with the combine."""
    parts = forward_ops_by_part(layer().forward)
    assert names(parts["attention"])[-1] == "moe.permute" and "shared.fc2" in names(parts["attention"])
    assert names(parts["dispatch"]) == ["moe.sync0", "moe.dispatch", "moe.dispatch_weights"]
    assert names(parts["experts"])[0] == "moe.sort" and names(parts["experts"])[-1] == "moe.unsort"
    assert names(parts["combine"]) == ["moe.combine"]
    assert names(parts["end"]) == ["moe.unpermute", "moe.add_shared", "out.add"]


def test_weight_gradients_come_later_but_the_routers() -> None:
    tapes = layer(delays=True)
    parts = backward_ops_by_part(tapes.forward, tapes.backward, delays=True)
    assert names(parts["experts' weights"]) == ["experts.fc2.wgrad", "experts.fc1.wgrad"]
    late = {op.origin for op in parts["attention's weights"]}
    assert late == {"shared.fc2", "shared.fc1", "proj", "qkv"}
    assert "router.gate.wgrad" in names(parts["attention"])
    assert tuple(op for name in BACKWARD_PARTS for op in parts[name]) == tapes.backward.ops


def test_exchanges_have_a_stream_of_their_own() -> None:
    """Dispatch and combine both ways, whose outputs come from that stream's memory; counts do not go with them."""
    for tape in (layer().forward, layer().backward):
        assert {op.routing for op in tape.ops if op.stream == EXPERT_STREAM} == {"dispatch", "combine"}
    counts = next(op for op in layer().forward.ops if op.name == "moe.counts")
    assert counts.stream == "ep"
    assert all(op.stream != EXPERT_STREAM for op in layer(overlap="none").forward.ops)


@cache
def estimator(delays: bool) -> TableEstimator:
    job, machines = workload(moe_llama()), cluster(8)
    spec = framework("megatron", expert_overlap="combined", delay_wgrad=delays)
    row = checked_strategy_row(job, machines, spec, parse_strategy("ep=8 micro_batch=1"))
    return TableEstimator(job, machines, spec, row, routing_loads_by_ep(job, row))


@pytest.mark.parametrize("delays", [False, True])
def test_a_pair_takes_no_longer_than_both_and_computes_as_much(delays: bool) -> None:
    costs = estimator(delays).parts[0].costs
    ((mode, kinds),) = costs.blocks.items()
    own = [EXPOSED.index(name) for name in COMPUTING_FAMILIES]
    for f, forward in enumerate(kinds):
        for b, backward in enumerate(kinds):
            pair = costs.combined_layer_times[mode][f][b]
            alone = forward.forward.exposed + backward.backward.exposed
            assert np.all(pair.total_s <= alone.sum(axis=0) * (1 + 1e-3))
            np.testing.assert_allclose(pair.exposed[own].sum(axis=0), alone[own].sum(axis=0), rtol=0.01)


@pytest.mark.parametrize("delays", [False, True])
def test_the_host_issues_both_passes_of_a_pair(delays: bool) -> None:
    """A pair takes the host what its forward and its backward take: modules that both call are paid for twice."""
    (part,) = estimator(delays).parts
    machine = part.costs.machine
    for kinds in part.costs.blocks.values():
        for cost in kinds:
            tapes = cost.blocks[0]
            pair = combined_tape(tapes.forward, tapes.forward, tapes.backward, delays=delays)
            alone = [issue_seconds_array(tape.ops, machine).sum(axis=0) for tape in (tapes.forward, tapes.backward)]
            np.testing.assert_allclose(issue_seconds_array(pair.ops, machine).sum(axis=0), sum(alone), rtol=1e-9)


def test_each_part_of_a_backward_starts_autograd_anew() -> None:
    """Attention, dispatch, experts and combine of a layer with experts; attention and the rest of a dense one."""
    for delays in (False, True):
        for moe, nodes in ((True, 4), (False, 2)):
            ops = layer(moe=moe, delays=delays).backward.ops
            assert len({op.schedule_node for op in ops} - {0}) == nodes
    assert not any(op.schedule_node for op in layer(overlap="none").backward.ops)


def test_a_step_saves_what_it_hides() -> None:
    """What is exposed sums to the step, which is no shorter than its computing, and shorter than without if no host is
    late."""
    slow = estimator(True)
    machines, plainly = fast_hosts(slow.cluster), framework("megatron")
    fewer = TableEstimator(slow.workload, machines, slow.framework, slow.table, slow.loads)
    plain = TableEstimator(slow.workload, machines, plainly, slow.table, slow.loads)
    exposed, hidden = fewer.exposed_and_hidden_seconds()
    before, hidden_before = plain.exposed_and_hidden_seconds()
    computing = [TIME_COMPONENTS.index(name) for name in COMPUTING_FAMILIES]
    assert exposed[computing].sum() <= exposed.sum() < before.sum()
    assert hidden[HIDDEN_COMPONENTS.index("ep")] > hidden_before[HIDDEN_COMPONENTS.index("ep")]
    np.testing.assert_allclose(fewer.breakdown().step_s, exposed.sum(axis=0))


def test_one_micro_batch_saves_nothing() -> None:
    """Its forward and its backward run alone. The parts of four layers start autograd 16 times, at the host's cost."""
    job, machines = workload(moe_llama(), global_batch=8), cluster(8)
    at_once = with_host(machines, schedule_node_s=Fact(value=0.0, provenance="assumed", source="for a test"))
    steps = []
    for options, on in (
        ({}, machines),
        ({"expert_overlap": "combined"}, at_once),
        ({"expert_overlap": "combined"}, machines),
    ):
        spec = framework("megatron", **options)
        row = checked_strategy_row(job, on, spec, parse_strategy("ep=8 micro_batch=1"))
        steps.append(float(TableEstimator(job, on, spec, row, routing_loads_by_ep(job, row)).breakdown().step_s[0]))
    assert steps[0] == pytest.approx(steps[1], rel=0.02)
    slowest = steps[2] - steps[1]
    starts_s = 16 * machines.gpu.curves.host.schedule_node_s.value
    assert starts_s <= slowest <= 1.6 * starts_s


def test_exchanges_take_turns_on_their_stream() -> None:
    """model_chunk_schedule_plan.py, ``run``: combine_bwd, dispatch_fwd, dispatch_bwd, combine_fwd."""
    tapes = layer()
    both = combined_tape(tapes.forward, tapes.forward, tapes.backward, delays=False)
    sent = [op for op in both.ops if isinstance(op.work, Collective) and op.stream == EXPERT_STREAM]
    assert [op.name for op in sent] == [
        "B:moe.combine.backward", "F:moe.dispatch", "F:moe.dispatch_weights", "B:moe.dispatch_weights.backward",
        "B:moe.dispatch.backward", "F:moe.combine",
    ]  # fmt: skip


@pytest.mark.parametrize("delays", [False, True])
def test_a_pair_holds_more_than_either_and_less_than_both(delays: bool) -> None:
    tapes = layer(delays=delays)
    memory = block_memory(tapes, 1)
    peak, kinds = peak_bytes_of_layer_pair(tapes, tapes, 1, delays=delays)
    assert np.all(peak >= np.maximum(memory.forward_peak + 0.0, memory.backward_peak))
    assert np.all(peak <= memory.forward_peak + memory.backward_peak)
    np.testing.assert_allclose(kinds.sum(axis=0), peak)
