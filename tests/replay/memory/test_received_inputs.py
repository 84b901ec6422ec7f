"""What Megatron's 1F1B holds of inputs that it received: by what a recorded run reserved, and from recordings."""

from __future__ import annotations

import pytest

import mofa
from mofa.replay.allocator.caching import Allocator
from mofa.replay.memory.executor import StepExecutor
from mofa.replay.memory.rank_memory import play_memory
from mofa.replay.memory.received_inputs import ReceivedInputs
from mofa.replay.rank.from_estimator import describe_ranks
from mofa.search.strategy_estimator import strategy_estimator
from tests.replay.runs import load


def test_the_next_loss_does_not_find_its_hole() -> None:
    """Received inputs and their gradients come and go. Some are cut from the loss's hole, so that it takes a new one.

    Recorded so in te2-pp2-qwen14b-6l-eager-beginning-traced. Held from the first forward on, 6.1 % were missing.
    """
    run = load("te2-pp2-qwen14b-6l-eager")
    assert max(
        play_memory(rank).peak_reserved for rank in describe_ranks(run.estimator)
    ) / run.reserved - 1 == pytest.approx(0.0, abs=0.003)


def test_an_input_goes_behind_the_next_forward_and_its_gradient_behind_the_next_backward() -> None:
    """On the last of two stages: forward and backward of each micro-batch in turn. The first forward of a step lets
    both go that the last one left."""
    rank = describe_ranks(load("te2-pp2-qwen14b-6l-eager").estimator)[-1]
    player = StepExecutor(rank, Allocator(), skip_rounds=False)
    player.allocate_parameters_and_buffers()
    seen: list[tuple[str, int, int]] = []
    held: ReceivedInputs = player.received_inputs
    played = player.play_computation

    def play_and_look(kind: str, c: int, i: int) -> None:
        played(kind, c, i)
        seen.append((kind, *held.block_addresses()))

    player.steady.play = play_and_look
    player.run_step()
    player.run_step()
    forwards, backwards = seen[::2], seen[1::2]
    assert all(kind == "F" and received == -1 for kind, received, _ in forwards)
    assert all(kind == "B" and received >= 0 and gradient >= 0 for kind, received, gradient in backwards)
    num = rank.num_micro_batches
    assert [gradient == -1 for _, _, gradient in forwards] == 2 * [True, *[False] * (num - 1)]
    assert all(backwards[n][2] == forwards[n + 1][2] for n in range(num - 1))  # through the next forward


@pytest.mark.parametrize(("pp", "recompute"), [(2, "none"), (4, "none"), (4, "full")])
def test_repeating_recorded_computations_changes_nothing(pp: int, recompute: str) -> None:
    job = mofa.load_workload("llama3-8b", global_batch=4 * pp, overrides={"model.num_layers": 8})
    cluster, framework = mofa.load_cluster("h100-hgx", pp), mofa.load_framework("megatron")
    for rank in describe_ranks(
        strategy_estimator(job, cluster, framework, f"pp={pp} micro_batch=1 recompute={recompute}")
    ):
        repeated, played = (StepExecutor(rank, Allocator(), skip_rounds=skip) for skip in (True, False))
        repeated.steady.round_sizes = ()
        for player in (repeated, played):
            player.allocate_parameters_and_buffers()
            player.run_step()
            player.run_step()
        assert repeated.state.a.state_fingerprint() == played.state.a.state_fingerprint()
        assert repeated.state.journal.sizes == played.state.journal.sizes
        assert bool(repeated.steady.recordings_of) == (rank.num_micro_batches > 2)


def test_interleaved_chunks_hold_a_number_throughout() -> None:
    """Theirs is not played tensor by tensor."""
    ranks = describe_ranks(load("te4-pp4-vpp2-qwen14b-16l").estimator)
    assert not any(rank.keeps_received_inputs for rank in ranks)
