"""Experts that run one after the other: as many blocks as experts, each as large as its tokens."""

from __future__ import annotations

from collections import Counter

import pytest

from mofa.cost.allocations.block_trace import BlockTrace, NewTensor, OpTrace
from mofa.cost.allocations.sequential_experts import COPY, unroll_sequential_experts
from mofa.replay.rank.from_estimator import _block_traces
from mofa.replay.replayer import Replayer
from tests.replay.runs import load

RUN = "mc4-tp2-ep2-etp2-mixtral-3l"


@pytest.fixture(scope="module")
def layer() -> BlockTrace:
    """A layer of which a rank has four experts."""
    return next(
        one for one in _block_traces(load(RUN).estimator).values() if any(d.expert_loops > 1 for d in one.forward)
    )


def test_bytes_stay(layer: BlockTrace) -> None:
    """All experts' blocks of a tensor together have its bytes, but for rounding down."""
    shares = (0.4, 0.3, 0.2, 0.1)
    found = unroll_sequential_experts(layer, shares)
    for before, after in ((layer.forward, found.forward), (layer.backward, found.backward)):
        sums: Counter[str] = Counter()
        for deed in after:
            for item in deed.new:
                sums[item.name.split("#")[0]] += item.bytes
        for deed in before:
            for item in deed.new:
                times = len(shares) if item.name.startswith("dW:experts.") else 1
                assert times * item.bytes - len(shares) < sums[item.name] <= times * item.bytes


def test_everything_that_comes_goes_as_before(layer: BlockTrace) -> None:
    """What the block's deeds leave alive are the same tensors."""

    def left(life: BlockTrace) -> Counter[str]:
        alive: Counter[str] = Counter()
        for deed in (*life.forward, *life.backward):
            alive.update(item.name.split("#")[0] for item in deed.new)
            alive.subtract(name.split("#")[0] for name in deed.free)
        return Counter({name: n for name, n in alive.items() if n})

    assert left(unroll_sequential_experts(layer)) == left(layer)


def test_backward_begins_with_the_last_expert(layer: BlockTrace) -> None:
    found = [d.new[0].name for d in unroll_sequential_experts(layer).backward if d.op == "experts.fc1.dgrad"]
    assert found == [f"d:experts.parts#{j}" for j in (3, 2, 1, 0)]


def test_reserved_memory_is_as_measured() -> None:
    """One block for all four experts' rows made it 3.5 % too much."""
    run = load(RUN)
    assert Replayer(run.estimator).rank_memory(0).peak_reserved == pytest.approx(run.reserved, rel=0.005)


def test_gradients_of_slices_are_added_to_the_first() -> None:
    """Sums as large as all experts' weight come once, what later experts add to them each time; copies of weights are
    as large for each expert, whatever its tokens."""
    copy = OpTrace("w1.weight_cast", (NewTensor("w1.weight16", 16, 0, COPY),), expert_loops=2)
    product = OpTrace("w1.wgrad", (NewTensor("gW", 8, 0, 2),), free=("w1.weight16",), weight=True, expert_loops=2)
    added = OpTrace(
        "w1.whole", (NewTensor("dW", 16, 0, 2),), (NewTensor("scratch", 16, 0, 5),), free=("gW",), weight=True,
        expert_loops=2, role="whole",
    )  # fmt: skip
    one = BlockTrace("moe", (copy,), (product, added), "", "", "", frozenset(), ())
    found = unroll_sequential_experts(one, (0.75, 0.25))
    assert [(item.name, item.bytes, item.expert) for deed in found.forward for item in deed.new] == [
        ("w1.weight16#0", 8, -1), ("w1.weight16#1", 8, -1),
    ]  # fmt: skip
    assert [[item.name for item in (*deed.new, *deed.scratch)] for deed in found.backward] == [
        ["gW"], ["dW"], ["gW"], ["scratch"],
    ]  # fmt: skip
