"""Reserved memory's closed form: pieces that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

import mofa
from mofa.cost.reserve import _apart, holes_bytes
from mofa.cost.rows import Rows
from mofa.replay.ranks import rows_of
from mofa.search.playing import estimator_of


def rows(framework: str, strategy: str, gpus: int) -> Rows:
    job = mofa.load_workload("llama3-70b", global_batch=64)
    machines = mofa.load_cluster("h200-hgx", gpus)
    return rows_of(estimator_of(job, machines, mofa.load_framework(framework), strategy))


@pytest.mark.parametrize(("micro_batch", "expected"), [(1, 0.8235), (4, 0.8235), (16, 0.0)])
def test_gradients_larger_than_any_activation(micro_batch: int, expected: float) -> None:
    """Llama 3 70B on cp 4, 2048 tokens a sequence and rank: an activation of the MLP's width has 117 MB a sequence.

    Of a layer's 855 M parameters the MLP's three weights have 705 M, in fp32 blocks of 940 MB; query and output 134 M,
    of 268 MB; key and value 17 M, of 34 MB. The largest bf16 gradient has 470 MB, whatever the tokens.
    """
    share = _apart(rows("torchtitan", f"pp=4 cp=4 dp=2 micro_batch={micro_batch}", 32))
    assert share[0, 1] == pytest.approx(expected, abs=1e-4)
    assert np.all((share >= 0.0) & (share <= 1.0))


def test_pieces_of_holes_are_at_most_the_holes() -> None:
    """A layer's forward of one short sequence holds less than what the parameters left, of many more."""
    for micro_batch in (1, 16):
        some = rows("megatron", f"tp=2 pp=4 cp=4 dp=2 micro_batch={micro_batch} recompute=full", 64)
        held = float(np.max(some.layers.forward_peak))
        holes = float(some.static.params[0, 1])
        lost = holes_bytes(some, np.full((1, 4), 1e15))[0, 1]  # so much is alive that nothing else matters
        assert lost == pytest.approx(min(held, holes), rel=0.02)
