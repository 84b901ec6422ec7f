"""Transformer Engine's context parallelism by hand: what is exchanged, kept, and allocated on which stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mofa
from mofa.blocks.build import BlockTapes, CostedLayerKind, layer_tapes
from mofa.blocks.elementwise import value_of_combination
from mofa.blocks.frameworks.megatron.cp import ORDER
from mofa.blocks.op import CP_POOL, Tape
from mofa.blocks.work import Attention, Collective, MemoryBound
from mofa.cost.allocations.allocation_trace import STREAMS, block_allocation_trace
from tests.blocks.small import context, framework, kept, llama, primitives, size

S, A, K, D = 1024, 8, 4, 64
"""Tokens of the sequence, heads, key-value heads, and each one's size."""


def of(kind: str, cp: int) -> BlockTapes:
    """One dense layer on one of ``cp`` ranks."""
    ctx = context(llama(), framework("megatron"), seq_len=S, micro_batch=1)
    several = np.array([cp > 1])
    ctx = replace(ctx, cp=np.array([float(cp)]), cp_ring=several & (kind == "ring"), cp_a2a=several & (kind == "a2a"))
    return layer_tapes(ctx, primitives(ctx), CostedLayerKind(moe=False))


def sent(tape: Tape) -> dict[str, list[float]]:
    """Payloads of what context parallelism sends, by kind. [B]"""
    out: dict[str, list[float]] = {}
    for op in tape.ops:
        if isinstance(op.work, Collective) and op.work.group == "cp":
            out.setdefault(op.work.kind, []).append(float(np.asarray(op.work.payload).item()))
    return out


@pytest.mark.parametrize("cp", [2, 4])
def test_what_is_sent(cp: int) -> None:
    """Ring: keys and values to each other rank, back with their gradients. All-to-all: every tensor once each way."""
    query, kv = 2 * S // cp * A * D, 2 * 2 * S // cp * K * D
    ring, gathers, a2a = of("ring", cp), of("allgather", cp), of("a2a", cp)
    assert sent(ring.forward) == {"send_recv": [(cp - 1) * kv]}
    assert sent(ring.backward) == {"send_recv": [2 * (cp - 1) * kv]}
    assert sent(gathers.forward) == {"all_gather": [cp * kv]}
    assert sent(gathers.backward) == {"all_gather": [cp * kv], "reduce_scatter": [cp * kv]}
    assert sent(a2a.forward) == {"all_to_all": [query, kv / 2, kv / 2, query]}
    assert sorted(sent(a2a.backward)["all_to_all"]) == sorted([query, kv / 2, kv / 2, query])


@pytest.mark.parametrize("cp", [2, 4])
def test_what_is_kept(cp: int) -> None:
    """As without; an exchange of heads keeps the kernel's own output beside what the projection keeps."""
    alone = context(llama(), framework("megatron"), seq_len=S // cp, micro_batch=1)
    plain = sum(kept(layer_tapes(alone, primitives(alone), CostedLayerKind(moe=False))).values())
    for kind in ("ring", "allgather"):
        assert sum(kept(of(kind, cp)).values()) == pytest.approx(plain)
    assert sum(kept(of("a2a", cp)).values()) == pytest.approx(plain + 2 * S // cp * A * D)


def flops(tape: Tape) -> float:
    return sum(float(np.asarray(op.work.flops).item()) for op in tape.ops if isinstance(op.work, Attention))


@pytest.mark.parametrize("kind", ["ring", "allgather", "a2a"])
@pytest.mark.parametrize("cp", [2, 4])
def test_each_rank_has_its_part_of_the_pairs(kind: str, cp: int) -> None:
    """Half of all pairs, a cp-th of them each: forward two products, backward five. Over gathered keys the backward
    skips no masked block: two chunks of S / 2 cp queries have half a square each of these."""
    pairs = S * (S + 1) / 2 / cp
    masked = (S / 2 / cp) ** 2 if kind == "allgather" else 0.0
    assert flops(of(kind, cp).forward) == pytest.approx(2 * 2 * A * D * pairs)
    assert flops(of(kind, cp).backward) == pytest.approx(5 * 2 * A * D * (pairs + masked))


def test_gathered_chunks_are_put_in_order_forward_and_twice_back() -> None:
    """Keys and values of all ranks, read and written; back they are gathered again, and their gradients scattered."""
    tapes = of("allgather", 2)
    ordered = 2.0 * (2.0 * S * K * 2 * D)
    (forward,) = [op for op in tapes.forward.ops if op.name == "attn.kv_order"]
    assert isinstance(forward.work, MemoryBound) and forward.work.like == ORDER
    assert float(np.asarray(forward.work.bytes).item()) == ordered
    parts = [part for op in tapes.backward.ops if isinstance(op.work, MemoryBound) for part in op.work.parts]
    assert [float(np.asarray(moved).item()) for moved, like in parts if like == ORDER] == [2.0 * ordered]


def beside(block_: BlockTapes) -> dict[str, int]:
    """Bytes that come from the pool of the stream beside."""
    deeds = block_allocation_trace(block_)
    return {
        item.name: item.bytes
        for deed in (*deeds.forward, *deeds.backward)
        for item in deed.new
        if item.stream == STREAMS[CP_POOL]
    }


def test_the_stream_beside_has_a_pool_of_its_own() -> None:
    """A ring's second step puts its output there, from the third step on a second one and a buffer; an exchange of
    heads what it keeps of queries, keys and values, what it returns, and its gradients."""
    query, kv, lse = 2 * S // 2 * A * D, 2 * 2 * S // 2 * K * D, 4 * S // 2 * A
    assert beside(of("ring", 2)) == {"attn.side": query + lse}
    assert beside(of("ring", 4)) == {"attn.side": query + lse + kv // 2}  # half the tokens: 2 * (out + lse) + kv
    found = beside(of("a2a", 2))
    assert found.pop("attn.out.joined") == query
    assert {name: found.pop(f"attn.{name}.heads") for name in "qkv"} == {"q": query, "k": kv // 2, "v": kv // 2}
    assert sorted(found.values()) == sorted([query, query, kv // 2, kv // 2])  # of the output; of what was given


def test_a_rings_buffers_by_hand() -> None:
    """Forward joins its own keys and values and receives others': two buffers, three from the third step on, the last
    of which the backward has in place of keys and values. Back two of keys and values with their gradients: of one the
    returned gradients are views, which keep it. NCCL uses all of them."""
    for cp, buffers in ((2, 2), (4, 3)):
        kv = 2 * 2 * S // cp * K * D
        tapes = of("ring", cp)
        assert size(tapes.forward, "attn.kv_joined") + size(tapes.forward, "attn.kv_received") == buffers * kv
        assert size(tapes.forward, "attn.k.turned") == size(tapes.forward, "attn.v.turned") == 0
        given = [size(tapes.backward, f"d:attn.{name}.turned") for name in "kv"]
        assert given == [0, 2 * kv]
        assert size(tapes.backward, "d:attn.partial") == 2 * kv
        tensors = {**tapes.forward.tensors, **tapes.backward.tensors}
        sent = {name for name, tensor in tensors.items() if value_of_combination(tensor.recorded_on_nccl_stream)}
        later = {f"attn.kv_step{step}" for step in range(3, cp)}
        assert sent == {"attn.kv_joined", *later, "attn.kv_received", "d:attn.v.turned", "d:attn.partial"}
        assert all(size(tapes.forward, name) == kv for name in later)


@pytest.mark.parametrize("kind", ["ring", "allgather", "a2a"])
def test_closed_form_and_replay_agree(kind: str) -> None:
    job: Any = mofa.load_workload("llama3-8b", seq_len=8192, global_batch=4, overrides={"model.num_layers": 4})
    machines, strategy = mofa.load_cluster("h100-hgx", 4), {"cp": 4, "cp_kind": kind, "micro_batch": 1}
    closed, replayed = (mofa.estimate(job, machines, strategy, replay=replay) for replay in (False, True))
    assert closed.memory.allocated_bytes == pytest.approx(replayed.memory.allocated_bytes, rel=0.02)
    assert closed.step_s == pytest.approx(replayed.step_s, rel=0.03)
