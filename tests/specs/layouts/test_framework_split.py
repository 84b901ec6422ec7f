"""Frameworks' own splits of layers, by degrees and by options."""

from __future__ import annotations

import pytest

from mofa.specs.layouts.framework_split import (
    MEGATRON_SPLIT,
    TORCHTITAN_SPLIT,
    SplitError,
    SplitOptions,
    megatron_layers_by_chunk,
    parse_split_options,
    torchtitan_layers_by_chunk,
)


def test_megatron_splits_evenly_or_not_at_all() -> None:
    """80 layers over 16 stages of 2 chunks are refused (transformer_block.py, get_num_layers_to_build)."""
    assert megatron_layers_by_chunk(64, 16, 2) == (2,) * 32
    with pytest.raises(SplitError, match="5 layers of a stage don't divide over its 2 chunks"):
        megatron_layers_by_chunk(80, 16, 2)
    with pytest.raises(SplitError, match="30 layers don't divide over 4 stages"):
        megatron_layers_by_chunk(30, 4, 1)


def _given(first: int, last: int) -> SplitOptions:
    return SplitOptions(MEGATRON_SPLIT, layers_of_first=first, layers_of_last=last)


def test_ends_with_layers_of_their_own_share_them_over_their_chunks() -> None:
    """Megatron's chunk c of rank r is the (c * pp + r)-th of the model."""
    assert _given(4, 2).layers_by_chunk(30, 4, 2) == (2, 6, 6, 1, 2, 6, 6, 1)
    assert SplitOptions(MEGATRON_SPLIT, layers_of_last=2).layers_by_chunk(8, 3, 1) == (3, 3, 2)
    for options, layers, pp, vpp, why in (
        (SplitOptions(MEGATRON_SPLIT, layers_of_first=3), 12, 4, 2, "3 layers of a stage don't divide"),
        (SplitOptions(MEGATRON_SPLIT, layers_of_first=3), 12, 4, 4, "3 layers of a stage don't divide"),
        (_given(2, 2), 11, 4, 1, "7 layers between the ends don't divide over 2"),
        (_given(6, 6), 11, 4, 1, "-1 of 11 layers are left for 2 stages"),
        (_given(6, 4), 11, 2, 1, "1 of 11 layers are left for 0 stages"),
        (SplitOptions(MEGATRON_SPLIT, layers_of_first=0), 12, 4, 1, "need a layer each"),
        (_given(2, 2), 4, 1, 1, "give one number"),
        (SplitOptions(MEGATRON_SPLIT, layers_of_first=2, counts_loss=True), 12, 4, 1, "keep one"),
    ):
        with pytest.raises(SplitError, match=why):
            options.layers_by_chunk(layers, pp, vpp)


def test_an_embedding_and_a_loss_that_count_take_a_layers_place() -> None:
    """Llama 3 405B: 126 layers in 128 chunks; 62 with the loss on 8 x 2 leave 3 on the last."""
    both = SplitOptions(MEGATRON_SPLIT, counts_embedding=True, counts_loss=True)
    assert both.layers_by_chunk(126, 16, 8) == (0, *[1] * 126, 0)
    assert SplitOptions(MEGATRON_SPLIT, counts_loss=True).layers_by_chunk(63, 8, 2) == (*[4] * 15, 3)
    with pytest.raises(SplitError, match="with the embedding and the loss don't divide over 16"):
        both.layers_by_chunk(80, 16, 1)


def test_torchtitan_gives_the_first_chunks_one_more() -> None:
    """By hand of generate_llm_fqn_per_model_part(5, 16): 18 modules' worth, 4 4 4 3 3, less one at each end."""
    assert torchtitan_layers_by_chunk(16, 5) == (3, 4, 4, 3, 2)
    assert torchtitan_layers_by_chunk(12, 12) == (1, 2, *[1] * 9, 0)
    assert torchtitan_layers_by_chunk(7, 1) == (7,)
    assert torchtitan_layers_by_chunk(3, 2, 2, 2) == (2, 1)
    with pytest.raises(SplitError, match="leave some of 8 chunks empty"):
        torchtitan_layers_by_chunk(5, 8)
    with pytest.raises(SplitError, match="counts as 4 layers, more than the 3"):
        torchtitan_layers_by_chunk(5, 3, 4, 1)


def test_options_are_read_as_frameworks_spell_them() -> None:
    """With dashes or underscores, as a command line or joined by +."""
    wanted = SplitOptions(MEGATRON_SPLIT, layers_of_first=7, layers_of_last=5)
    for text in (
        "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5",
        "decoder-first-pipeline-num-layers:7+decoder-last-pipeline-num-layers:5",
        "decoder_last_pipeline_num_layers=5, decoder_first_pipeline_num_layers=7",
    ):
        assert parse_split_options(text) == wanted
    assert parse_split_options("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split") == (
        SplitOptions(MEGATRON_SPLIT, counts_embedding=True, counts_loss=True)
    )
    assert parse_split_options("--parallelism.pipeline_parallel_first_stage_less_layers 2") == (
        SplitOptions(TORCHTITAN_SPLIT, less_on_first=2)
    )
    assert parse_split_options("Et*3|(tt|)*29m|L") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("decoder-frst-pipeline-num-layers:7", "at character 1: .* did you mean decoder-first-pipeline-num-layers"),
        ("decoder-first-pipeline-num-layers", "at character 1: .* with a number"),
        ("account-for-loss-in-pipeline-split:1", "at character 1: .* without a number"),
        (
            "decoder-last-pipeline-num-layers:7+decoder-last-pipeline-num-layers:8",
            "at character 36: decoder-last-pipeline-num-layers is given once",
        ),
        ("decoder-last-pipeline-num-layers:7+pipeline_parallel_last_stage_less_layers:2", "are mixed"),
        ("decoder-last-pipeline-num-layers:7+!", "at character 36: '!' is no option"),
    ],
)
def test_wrong_options_are_refused_with_their_place(text: str, why: str) -> None:
    """And what is meant."""
    with pytest.raises(SplitError, match=why):
        parse_split_options(text)
