"""Which tensors are alive at each op: by hand, and against a slow twin that counts one candidate op by op."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from mofa.blocks.backward import NO_RECOMPUTE, Recompute
from mofa.blocks.build import BlockTapes, CostedLayerKind, layer_tapes
from mofa.blocks.context import Context
from mofa.blocks.frameworks import primitives_of
from mofa.blocks.op import KINDS, Op, Tape, Tensor
from mofa.blocks.work import Gemm
from mofa.cost.block.liveness import (
    FEW,
    BlockMemory,
    allocator_rounded_bytes,
    block_memories,
    block_memory,
    peak_bytes_from_accumulation,
)
from mofa.specs.model import ModelSpec
from tests.blocks.small import context, together
from tests.cost.toy import framework, llama, mla_moe, moe_llama, windowed

CORE = Recompute(kind="regions", checkpoint=frozenset({"core_attn"}))
FULL = Recompute(kind="full")


def op(name: str, reads: str, writes: str, **more: Any) -> Op:
    return Op(name, "gemm", Gemm(1, 1, 1), tuple(reads.split()), tuple(writes.split()), **more)


def tape(tensors: dict[str, Any], inputs: str, outputs: str, *ops: Op) -> Tape:
    named = {name: Tensor(name, size) for name, size in tensors.items()}
    return Tape(ops, named, tuple(inputs.split()), tuple(outputs.split()))


def forward_backward(forward: Tape, backward: Tape) -> BlockMemory:
    return block_memory(BlockTapes("test", forward, backward), 1)


def test_two_products_by_hand() -> None:
    """x (1) -> a (10) -> y (100); the backward reads a: x and y are not its concern.

    Forward: x and a, then a and y. Backward: dy (200) and a make da (1000), which makes dx (2000).
    """
    memory = forward_backward(
        tape({"x": 1.0, "a": 10.0, "y": 100.0}, "x", "y", op("one", "x", "a"), op("two", "a", "y")),
        tape({"dy": 200.0, "da": 1e3, "dx": 2e3}, "dy", "dx", op("dtwo", "dy a", "da"), op("done", "da", "dx")),
    )
    assert memory.saved.tolist() == [10]
    assert memory.forward_peak.tolist() == [110]
    assert memory.backward_peak.tolist() == [3000]
    assert memory.largest.tolist() == [2000]
    assert (memory.forward_op.tolist(), memory.backward_op.tolist()) == ([1], [3])


def test_of_tensors_larger_than_a_size_by_hand() -> None:
    """x (1) -> a (10) -> y (100), backwards dy (200) -> da (1000) -> dx (2000), of which a is kept.

    Larger than 5: a is kept, beside it y is alive in the forward and all of the backward. Larger than 50: nothing is
    kept, y alone is alive in the forward.
    """
    blocks = BlockTapes(
        "test",
        tape({"x": 1.0, "a": 10.0, "y": 100.0}, "x", "y", op("one", "x", "a"), op("two", "a", "y")),
        tape({"dy": 200.0, "da": 1e3, "dx": 2e3}, "dy", "dx", op("dtwo", "dy a", "da"), op("done", "da", "dx")),
    )
    memory = block_memory(blocks, 1, np.array([[5.0], [50.0]]))
    assert memory.large_tensors_saved.tolist() == [[10.0], [0.0]]
    assert memory.large_tensors_forward.tolist() == [[100.0], [100.0]]
    assert memory.large_tensors_peak.tolist() == [[2990.0], [3000.0]]


def test_a_tensor_kept_by_two_ops_counts_once_and_a_view_not_at_all() -> None:
    sizes = {"x": 1.0, "a": 10.0, "v": 10.0, "y": 100.0}
    ops = op("one", "x", "a"), Op("view", "gemm", None, ("a",), ("v",), view=True), op("two", "v a", "y")
    memory = forward_backward(
        tape(sizes, "x", "y", *ops),
        tape({"dy": 200.0, "dx": 1.0}, "dy", "dx", op("d", "dy v", "dx"), op("d2", "a dx", "")),
    )
    assert memory.saved.tolist() == [10]
    assert memory.forward_peak.tolist() == [110]


def test_scratch_is_there_while_its_op_runs() -> None:
    forward = tape({"x": 1.0, "y": 10.0}, "x", "y", op("one", "x", "y", scratch=500.0))
    memory = forward_backward(forward, tape({"dy": 2.0, "dx": 3.0}, "dy", "dx", op("d", "dy x", "dx")))
    assert memory.forward_peak.tolist() == [511]
    assert memory.forward_kinds[KINDS.index("scratch")].tolist() == [500]
    assert memory.backward_peak.tolist() == [6]


def test_an_absent_op_hands_its_input_on() -> None:
    """Where the copy is made x goes and the copy is kept; where not, x itself is."""
    copy = op("copy", "x", "c", present=np.array([True, False]))
    block_ = BlockTapes(
        "test",
        tape({"x": 1.0, "c": 10.0, "y": 100.0}, "x", "y", copy, op("use", "c", "y")),
        tape({"dy": 100.0, "dx": 1.0}, "dy", "dx", op("d", "dy c", "dx")),
    )
    memory = block_memory(block_, 2)
    assert memory.saved.tolist() == [10, 1]
    assert memory.forward_peak.tolist() == [110, 101]


@pytest.mark.parametrize(("later", "alive"), [(2.0, {"activation": 5.0, "grad": 3.0}), (9.0, {"activation": 14.0})])
def test_gradients_go_one_by_one_as_larger_ones_are_made(later: float, alive: dict[str, float]) -> None:
    """16-bit gradients of 2, 4 and 1 bytes, of weights in the order a, b, c, and dx (5) at the op that makes larger
    ones, 14 in all. Most of both is there with b's larger one: 4 + 8, and 4 + 1 of the others, which are 3 more than
    14. Behind that op there are the 14, dx and what comes ``later``.
    """
    forward = tape({"x": 1.0, "y": 1.0}, "x", "y", op("a", "x", "y"), op("b", "x", "y"), op("c", "x", "y"))
    gradients = {"dc": (1.0, "c"), "db": (4.0, "b"), "da": (2.0, "a")}
    tensors = {name: Tensor(name, size, kind="grad", weight=weight) for name, (size, weight) in gradients.items()}
    others = {name: Tensor(name, size) for name, size in {"dy": 100.0, "dx": 5.0, "later": later}.items()}
    ops = (op("d", "dy", "dc db da dx"), op("accumulate", "dc db da", ""), op("end", "dx", "later"))
    block = BlockTapes("test", forward, Tape(ops, tensors | others, ("dy",), ("dx",)))
    most = peak_bytes_from_accumulation(block, "accumulate", 1)[:, 0]
    assert {kind: most[i] for i, kind in enumerate(KINDS) if most[i]} == alive
    assert not peak_bytes_from_accumulation(block, "no such op", 1).any()


def memory_of(**given: float) -> BlockMemory:
    """A block's memory with these bytes, all of it activations."""
    values: dict[str, Any] = {}
    for f in fields(BlockMemory):
        if f.name.endswith("_kinds"):
            values[f.name] = np.zeros((len(KINDS), 1))
            source = {"saved_kinds": "saved", "forward_kinds": "forward_peak", "backward_kinds": "backward_peak"}[
                f.name
            ]
            values[f.name][0] = given.get(source, 0.0)
        else:
            values[f.name] = np.array([given.get(f.name, 0.0)])
    return BlockMemory(**values)


def test_one_block_then_another() -> None:
    """The second runs on top of what the first keeps; the first alone may be the larger all the same."""
    small, large = (
        memory_of(saved=5, forward_peak=7, backward_peak=9),
        memory_of(saved=20, forward_peak=50, backward_peak=70),
    )
    both = small.followed_by(large)
    assert (both.saved[0], both.forward_peak[0], both.backward_peak[0]) == (25, 55, 75)
    other = large.followed_by(small)
    assert (other.saved[0], other.forward_peak[0], other.backward_peak[0]) == (25, 50, 70)
    for joined in (both, other):
        assert joined.saved_kinds.sum() == 25
        assert joined.forward_kinds.sum() == joined.forward_peak[0]
        assert joined.backward_kinds.sum() == joined.backward_peak[0]


def test_then_is_associative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        blocks = []
        for _ in range(3):
            saved = rng.integers(0, 50)
            blocks.append(
                memory_of(saved=saved, forward_peak=rng.integers(0, 90), backward_peak=saved + rng.integers(0, 90))
            )
        a, b, c = blocks
        left, right = a.followed_by(b).followed_by(c), a.followed_by(b.followed_by(c))
        for f in fields(BlockMemory):
            assert np.array_equal(getattr(left, f.name), getattr(right, f.name)), f.name


def test_rounding_of_the_allocator() -> None:
    """512 B below 10 MiB, 2 MiB segments from there on; what is whole stays whole."""
    mib = 2.0**20
    asked = np.array([0, 1, 512, 513, 3 * mib, 10 * mib, 10 * mib + 1, 12 * mib])
    assert allocator_rounded_bytes(asked).tolist() == [0, 512, 512, 1024, 3 * mib, 10 * mib, 12 * mib, 12 * mib]


def twin(block_: BlockTapes, k: int) -> dict[str, float]:
    """One candidate: allocate what an op writes, free what nothing reads any more, and look at each op."""
    ops = (*block_.forward.ops, *block_.backward.ops)
    boundary = len(block_.forward.ops)
    tensors = {**block_.forward.tensors, **block_.backward.tensors}

    def at(value: Any) -> Any:
        flat = np.asarray(value).reshape(-1)
        return flat[k] if len(flat) > 1 else flat[0]

    owner = {name: name for name in tensors}
    for o in ops:
        always = bool(np.all(np.asarray(o.view)))
        if o.reads and bool(at(o.aliases_first_input())):
            for name in o.writes if always else o.writes[:1]:
                owner[name] = owner[o.reads[0]]
    last = dict[str, int]()
    born = {**{owner[n]: 0 for n in block_.forward.inputs}, **{owner[n]: boundary for n in block_.backward.inputs}}
    until = dict.fromkeys(block_.forward.outputs, boundary - 1) | {n: len(ops) - 1 for n in block_.backward.outputs}
    touched = set[str]()
    for i, o in enumerate(ops):
        for name in (*o.reads, *o.writes):
            touched.add(owner[name])
            last[owner[name]] = max(last.get(owner[name], 0), until.get(name, i))
        for name in o.writes:
            born.setdefault(owner[name], i)
    for name, end in until.items():
        last[owner[name]] = max(last.get(owner[name], 0), end)
    size = {n: float(at(tensors[n].bytes)) for n in born if n in touched}
    alive = [
        sum(v for n, v in size.items() if born[n] <= i <= last[n]) + (float(at(o.scratch)) if at(o.present) else 0.0)
        for i, o in enumerate(ops)
    ]
    return {
        "saved": sum(v for n, v in size.items() if born[n] < boundary <= last[n]),
        "forward_peak": max(alive[:boundary]),
        "backward_peak": max(alive[boundary:]),
    }


def contexts(model: ModelSpec, name: str) -> Context:
    """Several combinations of degrees as one context."""
    spec = framework(name)
    moe = model.moe is not None
    sp = [True] if moe or name == "torchtitan" else [True, False]
    some = [context(model, spec, micro_batch=b) for b in (1, 3)]
    some += [context(model, spec, tp=t, sp=s, etp=t if moe else 1) for t in (2, 4) for s in sp]
    if moe:
        some += [context(model, spec, ep=4), context(model, spec, tp=2, sp=True, ep=2, etp=1)]
    return together(some)


@pytest.mark.parametrize("name", ["megatron", "megatron-local", "torchtitan"])
@pytest.mark.parametrize("model", [llama(), windowed(), moe_llama(), mla_moe()], ids=lambda m: m.name)
@pytest.mark.parametrize("recompute", [NO_RECOMPUTE, CORE, FULL], ids=["none", "core_attn", "full"])
def test_slow_twin(model: ModelSpec, name: str, recompute: Recompute) -> None:
    """Every candidate of a layer's tapes, side by side in one array, is what it is by itself."""
    if name == "torchtitan" and recompute is CORE:
        return  # it has no such mode
    ctx = contexts(model, name)
    num_k = len(ctx.tp)
    for kind in dict.fromkeys(CostedLayerKind(model.is_moe_layer(i), model.is_windowed_layer(i)) for i in range(3)):
        tapes = layer_tapes(ctx, primitives_of(ctx.framework), kind, recompute)
        memory = block_memory(tapes, num_k)
        for k in range(num_k):
            slow = twin(tapes, k)
            for field, value in slow.items():
                assert float(getattr(memory, field)[k]) == pytest.approx(value), (field, k)
        np.testing.assert_allclose(memory.saved_kinds.sum(axis=0), memory.saved)
        np.testing.assert_allclose(memory.forward_kinds.sum(axis=0), memory.forward_peak)
        np.testing.assert_allclose(memory.backward_kinds.sum(axis=0), memory.backward_peak)
        assert np.all(memory.backward_peak >= memory.saved)


@pytest.mark.parametrize("name", ["megatron", "torchtitan"])
def test_several_blocks_in_one_go_are_what_each_is_alone(name: str) -> None:
    """Of few combinations; a block that allocates nothing and one without a backward among them. Sizes between those of
    the tensors tell apart what is larger than each."""
    ctx = contexts(moe_llama(), name)
    num_k = len(ctx.tp)
    assert num_k < FEW
    p = primitives_of(ctx.framework)
    nothing, once = tape({}, "", ""), tape({"x": 1.0, "y": 10.0}, "x", "y", op("one", "x", "y"))
    blocks = [
        layer_tapes(ctx, p, CostedLayerKind(moe=True), FULL),
        BlockTapes("nothing", nothing, nothing),
        BlockTapes("once", once, nothing),
        layer_tapes(ctx, p, CostedLayerKind(moe=False)),
    ]
    sizes = np.sort([np.broadcast_to(t.bytes, num_k) for t in blocks[0].forward.tensors.values()], axis=0)
    large = 0.75 * sizes[[len(sizes) // 2, -2]]
    for together_, alone in zip(
        block_memories(blocks, num_k, large), (block_memory(b, num_k, large) for b in blocks), strict=True
    ):
        for f in fields(BlockMemory):
            np.testing.assert_allclose(getattr(together_, f.name), getattr(alone, f.name), err_msg=f.name)
        assert np.all(together_.large_tensors_saved[0] >= together_.large_tensors_saved[1])
    assert block_memories([blocks[2]], 1)[0].backward_peak.tolist() == [0.0]
