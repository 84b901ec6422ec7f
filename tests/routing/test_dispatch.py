"""Tokens to replicas: every one arrives, and none travels that could have stayed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mofa.errors import SpecError
from mofa.routing.balance.flow import FlowScheduler
from mofa.routing.dispatch import gpu_to_gpu_tokens, route_tokens
from mofa.routing.placement import Placement, symmetric_placement


def algorithm_1(placement: Placement, tokens: np.ndarray, inputs: np.ndarray, gpus_per_node: int) -> np.ndarray:
    """The paper's loop, token range by token range: own GPU, own node, others, each in order."""
    experts, gpus = placement.experts_and_gpus
    num = placement.num_gpus
    flow = np.zeros((placement.num_experts, num, num), dtype=int)
    left, room = inputs.copy(), np.zeros_like(inputs)
    room[experts, gpus] = tokens
    near = [
        lambda g, t: g == t,
        lambda g, t: g // gpus_per_node == t // gpus_per_node,
        lambda g, t: True,
    ]
    for allowed in near:
        for e in range(placement.num_experts):
            for g in range(num):
                for t in range(num):
                    if allowed(g, t):
                        y = min(left[e, g], room[e, t])
                        flow[e, g, t] += y
                        left[e, g] -= y
                        room[e, t] -= y
    return flow


@given(st.integers(0, 999), st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None, max_examples=30)
def test_agrees_with_the_papers_loop(seed: int, gpus_per_node: int) -> None:
    rng = np.random.default_rng(seed)
    placement = symmetric_placement(16, 8, 4)
    inputs = rng.multinomial(300, rng.dirichlet(np.full(16, 0.3)), 8).T
    tokens = FlowScheduler(placement).schedule_micro_batch(inputs.sum(axis=1)).tokens
    flow = route_tokens(placement, tokens, inputs, gpus_per_node)
    twin = algorithm_1(placement, tokens, inputs, gpus_per_node)
    experts, gpus = placement.experts_and_gpus
    assert np.array_equal(flow, twin[experts, :, gpus].T)
    assert np.array_equal(twin.sum(axis=2), inputs) and twin.sum() == flow.sum()
    assert np.array_equal(flow.sum(axis=0), tokens)
    assert np.array_equal(gpu_to_gpu_tokens(placement, flow), twin.sum(axis=0))


def test_tokens_that_are_not_the_inputs_are_refused() -> None:
    with pytest.raises(SpecError, match="expert 0 has 6 tokens and replicas for 7"):
        route_tokens(Placement(np.array([[1, 1]])), np.array([3, 4]), np.array([[5, 1]]), 2)
