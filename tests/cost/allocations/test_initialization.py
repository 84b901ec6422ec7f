"""What torchtitan allocates before its first computation, as recorded allocations of its runs have it."""

from __future__ import annotations

import pytest

from mofa.blocks.roles import Purpose
from mofa.cost.allocations.initialization import BROADCAST, DRAFT, TABLE, ddp_broadcast_requests, weight_init_requests
from mofa.cost.allocations.weight_buffers import WeightBytes

MIB = 1 << 20


def weight(name: str, mib: float, chunk: int = 0, draft: float = 0.0, purpose: Purpose = "") -> WeightBytes:
    return WeightBytes(name, int(mib * MIB), 0, 0, 0, chunk=chunk, init_copy_bytes=int(draft * MIB), purpose=purpose)


def test_parts_are_built_one_after_the_other() -> None:
    """A second part's parameters come when the first one's values are drawn; parameters and tables stay."""
    wants = weight_init_requests(
        [weight("0 embedding", 8), weight("0 wq", 4, draft=8), weight("1 output", 8, 1, draft=16)], (4, 2, 2)
    )
    names = [want.name for want in wants if want.nbytes]
    assert names == ["0 embedding", "0 wq", TABLE, DRAFT, DRAFT, TABLE, DRAFT,
                     "1 output", TABLE, DRAFT, DRAFT, TABLE, DRAFT]  # fmt: skip
    gone = {want.slot for want in wants if not want.nbytes}
    kept = [want.name for want in wants if want.nbytes and want.slot not in gone]
    assert kept == ["0 embedding", "0 wq", TABLE, "1 output", TABLE]


def test_the_embedding_is_drawn_last_where_it_is_the_head() -> None:
    """Its values are the output projection's (``enable_weight_tying``)."""
    wants = weight_init_requests([weight("0 w", 8, draft=16, purpose="embedding"), weight("0 wq", 4, draft=8)], ())
    assert [want.nbytes // MIB for want in wants] == [8, 4, 8, 0, 16, 0]


@pytest.mark.parametrize("layers", [1, 3])
def test_broadcast_of_a_replica(layers: int) -> None:
    """Llama's layers at 250 MiB a buffer, of which two are there at once: as recorded of three layers on two H200s."""
    layer = [64, 16, 16, 64, 224, 224, 224]
    weights = [weight("embedding", 2004)]
    for _ in range(layers):
        weights += [*(weight("w", mib) for mib in layer), weight("norms", 1 / 64), weight("norms", 1 / 64)]
    wants = ddp_broadcast_requests([*weights, weight("norms", 1 / 64), weight("output", 2004)])
    first, later = [384, 448], [-384, 384, -448, 448] * (layers - 1)
    assert [(want.nbytes // MIB if want.nbytes else -1) for want in wants] == [
        n if n > 0 else -1 for n in (*first, *later, -384, 2004, -448, -2004)
    ]
    assert {want.name for want in wants if want.nbytes} == {BROADCAST}
