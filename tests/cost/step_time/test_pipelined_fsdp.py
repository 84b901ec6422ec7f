"""First forwards under FSDP's pipelines: gathers as the host gets to each piece, by hand."""

from __future__ import annotations

import numpy as np

from mofa.cost.block.host_clock import NEVER
from mofa.cost.step_time.pipelined_fsdp import _PiecesWalk

THERE = np.array([[True]])


def _add(walk: _PiecesWalk, gather: float, *clocks: float, kernels: float = 1.0) -> None:
    walk.add(THERE, 0.0, np.array([[gather]]), np.array([[*clocks, kernels]]))


def test_computing_waits_for_gathers_that_follow_each_other() -> None:
    """Three pieces of 1 s, issued at once: gathers of 2 s end at 2, 4 and 6 s."""
    walk = _PiecesWalk.beginning(np.zeros((1, 1)))
    for _ in range(3):
        _add(walk, 2.0, 1.0, NEVER, NEVER, 0.0)
    assert walk.clocks()[1] == [[7.0]]


def test_a_host_that_waits_gathers_no_earlier() -> None:
    """Three pieces of 1 s in each of which the host waits for the device: a gather is in front of each of them."""
    walk = _PiecesWalk.beginning(np.zeros((1, 1)))
    for _ in range(3):
        _add(walk, 2.0, 1.0, 1.0, 1.0, 1.0)
    assert walk.clocks()[1] == walk.clocks()[3] == [[9.0]]


def test_a_slow_host_hides_short_gathers() -> None:
    """Three pieces whose host issues for 4 s and computes for 1 s: gathers of 2 s are over when it has issued."""
    walk = _PiecesWalk.beginning(np.zeros((1, 1)))
    for _ in range(3):
        _add(walk, 2.0, 1.0, 4.0, NEVER, 4.0)
    assert walk.clocks()[1] == [[12.0]]


def test_stages_without_a_piece_are_as_before() -> None:
    walk = _PiecesWalk.beginning(np.zeros((1, 2)))
    walk.add(np.array([[True, False]]), 0.5, np.array([[2.0]]), np.array([[1.0, NEVER, NEVER, 0.0, 1.0]]))
    assert walk.clocks()[1].tolist() == [[3.5, NEVER]]


def test_a_device_that_waits_for_its_input_holds_up_gathers_beyond_the_launch_queue() -> None:
    """Four pieces of 1 s and 512 kernels: the host far ahead has launched three of them and gathered for these. The
    last gather, of 4 s, begins when the device has begun the second piece, at 1 s."""
    walk = _PiecesWalk.beginning(np.zeros((1, 1)))
    for _ in range(4):
        _add(walk, 4.0, 1.0, NEVER, NEVER, 0.0, kernels=512.0)
    assert walk.clocks()[0] == [[6.0]]


def test_computing_loses_beside_gathers_of_pieces_behind() -> None:
    """Three pieces of 4 s, issued at once: gathers of 2 s end at 2, 4 and 6 s. The first piece loses half of 2 s beside
    the second gather, the second of what is left of the third."""
    walk = _PiecesWalk.beginning(np.full((1, 1), 0.5))
    for _ in range(3):
        _add(walk, 2.0, 4.0, NEVER, NEVER, 0.0)
    assert walk.clocks()[1] == [[2.0 + 4.0 + 1.0 + 4.0 + 1.0 + 4.0]]
