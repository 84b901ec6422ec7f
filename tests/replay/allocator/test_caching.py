"""The allocator against PyTorch's: recorded sequences, event by event, and every rule by hand."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from mofa.replay.allocator.caching import Allocator
from mofa.replay.allocator.pools import ALLOCATED, FREE, UNMAPPED, Block, OutOfDeviceMemory, round_size, segment_size

MIB = 1 << 20
RECORDED = sorted((Path(__file__).parents[1] / "recorded").glob("*.json.gz"))


def _load(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return dict(json.load(file))


A = TypeVar("A", bound=Allocator)


def answer_recorded(record: dict[str, Any], kind: Callable[..., A], **options: Any) -> tuple[A, dict[int, Block]]:
    """An allocator behind all events of a record, each compared with what PyTorch did, and the blocks that live."""
    where = 0
    a = kind(record["capacity"] or None, fraction=True, place=lambda size: where, **options)
    live: dict[int, Block] = {}
    for n, (action, slot, size, stream, fits, address, allocated, reserved, retries) in enumerate(record["events"]):
        if action == "a":
            where = address
            if fits:
                live[slot] = a.malloc(size, stream)
                assert live[slot].address == address, n
            else:
                with pytest.raises(OutOfDeviceMemory):
                    a.malloc(size, stream)
        elif action == "f":
            a.free(live.pop(slot))
        else:
            a.empty_cache()
        assert (a.allocated, a.reserved, a.num_retries) == (allocated, reserved, retries), n
    return a, live


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.name.split(".")[0])
def test_recorded(path: Path) -> None:
    """PyTorch 2.11 on an H200: allocated, reserved, retries and every address after each of about 2900 events.

    The sequences mix sizes from 8 B to 1 GiB on three streams, in the native and the expandable allocator, with
    3 GB of room (requests that fit only after the cache is given back, and some that don't) and with the garbage
    collection threshold; see ``scripts/record_allocator.py``.
    """
    record = _load(path)
    conf = record["conf"]
    a, live = answer_recorded(
        record, Allocator, expandable="expandable" in conf, collect_above=0.6 if "garbage" in conf else 0.0
    )
    if not a.expandable:
        found = [
            [s.address, s.size, "small" if s.small else "large",
             [[b, size, "active_allocated" if state == ALLOCATED else "inactive"] for b, size, state in s.blocks]]
            for s in a.segments_with_free_or_live_blocks(live.values())
        ]  # fmt: skip
        assert found == sorted(record["segments"])


def test_there_are_recordings() -> None:
    assert len(RECORDED) == 5


@pytest.mark.parametrize(
    ("size", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
    ],
)
def test_rounding(size: int, rounded: int, segment: int) -> None:
    a = Allocator()
    a.malloc(size)
    assert round_size(size) == rounded
    assert segment_size(rounded) == segment == a.reserved


def test_splitting() -> None:
    """A large block is split where more than 1 MiB is left; else all of it counts as allocated."""
    a = Allocator()
    a.free(a.malloc(20 * MIB))
    x = a.malloc(19 * MIB)
    assert (x.size, a.allocated) == (20 * MIB, 20 * MIB)
    a.free(x)
    assert a.malloc(19 * MIB - 512).size == 19 * MIB - 512
    b = Allocator()  # 10 MiB + 512 takes a segment of 12: 2 MiB - 512 are left
    b.malloc(10 * MIB + 512)
    assert (b.allocated, b.reserved) == (10 * MIB + 512, 12 * MIB)
    c = Allocator()
    c.malloc(11 * MIB)  # 12 MiB, 1 MiB left: not split
    assert c.allocated == 12 * MIB
    d = Allocator()
    d.malloc(MIB)
    d.malloc(MIB - 512)  # the second half, 512 B are split off
    assert (d.allocated, d.reserved) == (2 * MIB - 512, 2 * MIB)
    d.malloc(512)
    assert d.reserved == 2 * MIB


def test_best_fit_takes_the_smallest_then_the_lowest() -> None:
    a = Allocator()
    blocks = [a.malloc(size * MIB) for size in (30, 14, 22, 14)]
    places = [block.address for block in blocks]
    for block in blocks:
        a.free(block)
    assert a.malloc(13 * MIB).address == places[1]
    assert a.malloc(13 * MIB).address == places[3]
    assert a.malloc(13 * MIB).address == places[2]
    assert a.reserved == 80 * MIB


def test_neighbours_join_within_a_segment_only() -> None:
    a = Allocator()
    x, y, z = (a.malloc(5 * MIB) for _ in range(3))
    a.free(x)
    a.free(z)
    assert a.free_bytes_by_stream_and_size_class() == {(0, False): 15 * MIB}
    assert sorted(
        size for s in a.segments_with_free_or_live_blocks() for _, size, state in s.blocks if state == FREE
    ) == [5 * MIB, 10 * MIB]
    a.free(y)
    (segment,) = a.segments_with_free_or_live_blocks()
    assert segment.blocks == ((segment.address, 20 * MIB, FREE),)
    a.free(a.malloc(10 * MIB))  # out of the same segment
    assert a.reserved == 20 * MIB
    b = Allocator()
    for block in [b.malloc(10 * MIB) for _ in range(2)]:
        b.free(block)
    b.malloc(20 * MIB)
    assert b.reserved == 40 * MIB


def test_streams_share_nothing() -> None:
    a = Allocator()
    a.free(a.malloc(20 * MIB, 0))
    a.malloc(20 * MIB, 1)
    assert a.reserved == 40 * MIB


def test_a_block_in_use_elsewhere_waits() -> None:
    a = Allocator()
    x = a.malloc(20 * MIB)
    a.free(x, streams=(0, 1))
    assert a.allocated == 0
    y = a.malloc(20 * MIB)
    assert a.reserved == 40 * MIB
    a.release_from_stream(1)
    a.malloc(20 * MIB)
    assert a.reserved == 40 * MIB
    a.free(y, streams=(0,))  # its own stream is no other
    assert sum(a.free_bytes_by_stream_and_size_class().values()) == 20 * MIB


def test_a_full_device_gets_whole_segments_back_and_is_asked_again() -> None:
    a = Allocator(64 * MIB)
    x, y = a.malloc(20 * MIB), a.malloc(30 * MIB)
    z = a.malloc(5 * MIB, 1) if a.reserved <= 44 * MIB else None
    assert z is None
    a.free(x)
    big = a.malloc(34 * MIB)
    assert (a.reserved, a.num_retries) == (64 * MIB, 1)
    with pytest.raises(OutOfDeviceMemory, match="do not fit") as failed:
        a.malloc(MIB)
    assert (failed.value.size, failed.value.capacity_bytes) == (MIB, 64 * MIB)
    a.free(big)
    a.free(y)
    a.empty_cache()
    assert a.reserved == 0


def test_a_split_segment_stays() -> None:
    a = Allocator()
    x, y = a.malloc(5 * MIB), a.malloc(5 * MIB)
    a.free(x)
    a.empty_cache()
    assert a.reserved == 20 * MIB
    a.free(y)
    a.empty_cache()
    assert a.reserved == 0


def test_expandable_grows_in_pages() -> None:
    """Large pages of 20 MiB, small of 2 MiB; a request takes the free end before it and maps what is missing."""
    a = Allocator(expandable=True)
    x = a.malloc(30 * MIB)
    assert a.reserved == 40 * MIB
    y = a.malloc(30 * MIB)  # 10 are free at the end, 20 more are mapped
    assert a.reserved == 60 * MIB
    assert y.address == x.address + 30 * MIB
    a.malloc(512)
    assert a.reserved == 62 * MIB
    a.free(x)
    a.free(y)
    a.malloc(60 * MIB)  # one range: no new memory
    assert a.reserved == 62 * MIB


def test_expandable_unmaps_whole_pages() -> None:
    a = Allocator(expandable=True)
    x, y = a.malloc(45 * MIB), a.malloc(5 * MIB)
    a.free(x)
    a.empty_cache()  # two pages go, 5 MiB of the third stay
    assert a.reserved == 20 * MIB
    (segment,) = a.segments_with_free_or_live_blocks([y])
    assert [state for _, _, state in segment.blocks] == [UNMAPPED, FREE, ALLOCATED, FREE, UNMAPPED]
    a.free(y)
    a.empty_cache()
    assert a.reserved == 0
    assert a.malloc(5 * MIB).address == segment.address


@pytest.mark.parametrize("expandable", [False, True])
def test_bytes_are_conserved(expandable: bool) -> None:
    """At any time what is reserved is what is allocated plus what is free, and no two blocks overlap."""
    a, rng = Allocator(1 << 30, expandable=expandable), random.Random(0)
    live: list[Block] = []
    for _ in range(3000):
        if live and rng.random() < 0.5:
            a.free(live.pop(rng.randrange(len(live))))
        else:
            try:
                live.append(a.malloc(int(2 ** rng.uniform(8, 27)), rng.randrange(2)))
            except OutOfDeviceMemory:
                a.free(live.pop())
        assert a.allocated + sum(a.free_bytes_by_stream_and_size_class().values()) == a.reserved <= 1 << 30
        assert a.allocated == sum(block.size for block in live)
    for segment in a.segments_with_free_or_live_blocks(live):
        at = segment.address
        for address, size, _ in segment.blocks:
            assert address == at
            at += size


def test_fingerprint_of_a_repeated_round() -> None:
    a = Allocator()

    def play() -> tuple[object, ...]:
        blocks = [a.malloc(size * MIB) for size in (3, 30, 12, 1)]
        for block in blocks[::-1]:
            a.free(block)
        return a.state_fingerprint()

    play()
    settled = play()
    assert play() == settled
    a.malloc(512)
    assert play() != settled
