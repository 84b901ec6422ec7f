"""The compiled allocator against its reference: PyTorch's recordings, random requests, and whole plans played."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import mofa
from mofa import compiled_parts
from mofa.replay.allocator import compiled
from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.compiled import CompiledAllocator, c_library, fastest_allocator
from mofa.replay.allocator.pools import Block, OutOfDeviceMemory, ReservedLimitPassed
from mofa.replay.memory import rank_memory
from mofa.replay.memory.rank_memory import RankMemoryReplay
from mofa.replay.rank.description import Rank
from mofa.replay.rank.from_estimator import describer_of_rank
from mofa.search.strategy_estimator import strategy_estimator
from tests.compile_part import compiled_anew
from tests.replay.allocator.test_caching import RECORDED, _load, answer_recorded

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        compiled_anew(compiled, tmp_path_factory.mktemp("compiled"), patch)
        yield
    c_library.cache_clear()


@pytest.mark.parametrize("name", ["native", "native-full"])
def test_recorded(name: str) -> None:
    """Every address and byte as PyTorch 2.11 has them: what the reference is held to as well."""
    (path,) = (path for path in RECORDED if path.name == f"{name}.json.gz")
    answer_recorded(_load(path), CompiledAllocator)


@pytest.mark.parametrize("seed", range(4))
def test_random_requests(seed: int) -> None:
    """Addresses, bytes and what is free after each of them, on a device that is full at times."""
    rng = random.Random(seed)
    both = Allocator(1 << 30), CompiledAllocator(1 << 30)
    live: list[tuple[Block, Block]] = []
    for _ in range(3000):
        if live and rng.random() < 0.5:
            pair = live.pop(rng.randrange(len(live)))
            for a, block in zip(both, pair, strict=True):
                a.free(block)
        else:
            size, stream, found = int(2 ** rng.uniform(8, 27)), rng.randrange(3), []
            for a in both:
                try:
                    found.append(a.malloc(size, stream))
                except OutOfDeviceMemory as full:
                    assert (full.reserved, full.allocated) == (a.reserved, a.allocated)
            if len(found) == 2:
                assert found[0].address == found[1].address and found[0].size == found[1].size
                live.append((found[0], found[1]))
            else:
                assert not found
        states = [(a.allocated, a.reserved, a.peak_allocated, a.num_retries, a.num_segments) for a in both]
        assert states[0] == states[1]
        free, numbered = (a.free_bytes_by_stream_and_size_class() for a in both)
        assert free == numbered


PLANS = (
    ("llama3-8b", "megatron", "pp=2 vpp=2 micro_batch=1 recompute=selective"),
    ("llama3-8b", "megatron", "tp=2 sp=true cp=2 pp=2 micro_batch=1"),
    ("llama3-8b", "torchtitan", "pp=2 vpp=2 schedule=zbv micro_batch=1"),
    ("qwen3-30b-a3b", "megatron", "pp=4 ep=4 micro_batch=1 recompute=full"),
    ("mixtral-8x7b", "torchtitan", "ep=8 pp=2 micro_batch=1"),
    ("llama3-8b", "megatron-2022", "tp=4 pp=2 micro_batch=1"),
)


def _ranks(name: str, framework: str, strategy: str) -> list[Rank]:
    layers = {"model.num_layers": 8}
    job = mofa.load_workload(name, global_batch=32, overrides=layers), mofa.load_cluster("h100-hgx", 16)
    estimator = strategy_estimator(*job, mofa.load_framework(framework), strategy)
    make = describer_of_rank(estimator)
    return [make(r) for r in range(int(estimator.table.pp[0]))]


def _played(rank: Rank, capacity_bytes: int | None) -> tuple[object, ...]:
    playing = RankMemoryReplay(rank, capacity_bytes=capacity_bytes)
    played = playing.play_drawn_steps() if rank.routing_drift is not None else playing.memory_played_so_far()
    journal = played.journal
    return (
        played.allocated, played.peak_reserved, played.allocated_between_steps, played.allocated_at_start,
        played.first_step_peak, played.retries, played.missing_bytes, played.peak_window, played.first_failure,
        played.peak_instant, played.out_of_memory_instant, journal.instructions, journal.sizes, journal.passages,
        journal.grown,
        journal.skipped_rounds, journal.computations,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "framework", "strategy"), PLANS)
def test_plans(name: str, framework: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is written down of a plan's ranks, with room and on devices that are nearly and wholly full."""
    for r, rank in enumerate(_ranks(name, framework, strategy)):
        playing = RankMemoryReplay(rank)
        assert type(playing.allocator) is CompiledAllocator
        peak = playing.memory_played_so_far().peak_reserved
        for capacity_bytes in (None, int(0.97 * peak)) if r else (int(0.8 * peak),):
            fast = _played(rank, capacity_bytes)
            with monkeypatch.context() as patch:
                patch.setattr(rank_memory, "fastest_allocator", Allocator)
                assert _played(rank, capacity_bytes) == fast


def test_limits() -> None:
    """It is passed at the same request."""
    for a in (Allocator(limit=40 * MIB), CompiledAllocator(limit=40 * MIB)):
        for _ in range(4):
            a.malloc(9 * MIB)
        with pytest.raises(ReservedLimitPassed) as passed:
            a.malloc(9 * MIB)
        assert passed.value.reserved == 60 * MIB


def test_what_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Expandable segments are; and all, where nothing is compiled, or not of this source."""
    assert type(fastest_allocator()) is CompiledAllocator
    assert type(fastest_allocator(expandable=True)) is Allocator
    none_there = compiled, "LIBRARY", tmp_path / "none.so"
    for module, name, wrong in (none_there, (compiled_parts, "source_hash", lambda _: "of other text")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            c_library.cache_clear()
            assert type(fastest_allocator()) is Allocator
            with pytest.raises(RuntimeError, match="not compiled"):
                CompiledAllocator()
        c_library.cache_clear()


def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an allocator goes what the compiled part has of it."""
    part = c_library()
    assert part is not None
    given_back, delete = [], part.segments_delete

    def counted(segments: int) -> None:
        given_back.append(segments)
        delete(segments)

    monkeypatch.setattr(part, "segments_delete", counted)
    a = CompiledAllocator()
    a.malloc(MIB)
    segments = a._segments
    assert not given_back
    del a
    gc.collect()
    assert given_back == [segments]
