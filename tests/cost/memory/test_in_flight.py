"""Moments at which a pipeline's rank may hold most."""

from __future__ import annotations

import numpy as np

from mofa.cost.memory.in_flight import in_flight_at_computations


def test_weights_and_gradients_of_a_chunk_go_behind_its_last_backward() -> None:
    """Two chunks, as many micro-batches as ranks: when the first chunk's backwards begin the second has gone."""
    kept, gone = (
        in_flight_at_computations("interleaved", "pytorch", 2, 2, 2, "B", by_chunk) for by_chunk in (False, True)
    )
    first = kept.chunk[0] == 0
    assert np.all(kept.has_gradients[0, first, 1] == 1)
    assert not kept.weights_freed.any()
    assert not kept.reduced.any()
    first = gone.chunk[0] == 0
    assert np.all(gone.has_gradients[0, first, 1] == 0)
    assert np.all(gone.weights_freed[0, first, 1] == 1)
    assert np.all(gone.reduced[0, first, 1] == 1)


def test_a_fourth_chunk_is_gathered_with_its_first_forward() -> None:
    """Of five chunks three are gathered ahead; each runs both of two micro-batches before the next one does."""
    moments = in_flight_at_computations("interleaved", "pytorch", 2, 5, 2, "F", unshards=True)
    away = {int(c): moments.weights_freed[0, moments.chunk[0] == c].tolist() for c in range(5)}
    assert away == {c: [[0, 0, 0, int(c < 3), int(c < 4)]] for c in range(5)}


def test_each_chunk_is_reduced_once_and_the_first_last() -> None:
    moments = in_flight_at_computations("interleaved", "pytorch", 4, 3, 8, "R", unshards=True)
    for chunk, flying, begun in zip(moments.chunk, moments.in_flight, moments.has_gradients, strict=True):
        assert sorted(chunk) == [0, 1, 2]
        at = {int(c): n for n, c in enumerate(chunk)}
        assert np.all(flying[at[0]] == 0)
        assert np.array_equal(begun[at[0]], [1, 0, 0])
        assert np.all(flying[at[2], :2] > 0)
