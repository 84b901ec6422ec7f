"""Layouts of pipelines as Megatron-Core parses them, and as text."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mofa.specs.layouts.pipeline_layout import LayoutError, PipelineLayout, parse_layout
from tests.specs.layouts.megatron_parser import (
    RECORDED,
    VERSION,
    Asked,
    megatron_folder,
    megatron_parser,
    of_megatron,
    of_mofa,
    random_cases,
)

NUM_RANDOM = 10_000


def test_published_layouts_are_read_and_written_as_they_stand() -> None:
    """61 layers on pp 16 x vpp 2 and on pp 8 x vpp 4 (NVIDIA's recipes of DeepSeek-V3)."""
    apart = parse_layout("Et*3|(tt|)*29m|L")
    assert apart.layers_by_chunk == (3, *[2] * 29, 0, 0)
    assert apart.prediction_chunk == 30
    apart.check_against_model(16, 2, 61, 1)
    together = parse_layout("Et|(tt|)*30mL")
    assert together.layers_by_chunk == (1, *[2] * 30, 0)
    assert together.prediction_chunk == 31
    together.check_against_model(8, 4, 61, 1)
    assert (apart.text, together.text) == ("Et*3|(tt|)*29m|L", "Et|(tt|)*30mL")


def test_recorded_texts_have_the_outcome_that_megatron_gave() -> None:
    """Of every kind of refusal but the one for length, which is not Megatron's."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    outcomes = {json.dumps(asked): of_mofa(Asked(*asked)) for *asked, _ in lines}
    assert outcomes == {json.dumps(asked): outcome for *asked, outcome in lines}
    assert len(lines) > 400
    assert len({outcome for *_, outcome in lines if isinstance(outcome, str)}) == 11


def test_random_texts_are_read_as_megatron_reads_them() -> None:
    """The same chunks, or the same refusal."""
    folder = megatron_folder()
    if folder is None:
        pytest.skip(f"megatron_core {VERSION} is not installed; MEGATRON_CORE may name an unpacked wheel")
    parser = megatron_parser(folder)
    asked = list(islice(random_cases(1), NUM_RANDOM))
    assert [one for one in asked if of_mofa(one) != of_megatron(parser, one)] == []


@pytest.mark.parametrize(
    ("text", "pp", "layers", "predictions", "rule", "place"),
    [
        ("Etx|tL", 2, 2, 0, "letter", 2),
        ("Et(tt|tL", 2, 4, 0, "letter", 2),
        ("Et|(t x|)*2tL", 2, 4, 0, "letter", 5),
        ("Et|t|tL", 2, 3, 0, "stages", 4),
        ("tE|tL", 2, 2, 0, "first", 0),
        ("", 1, 0, 0, "first", 0),
        ("Et|Lt", 2, 2, 0, "last", 4),
        ("EtE|tL", 2, 2, 0, "one embedding", 2),
        ("EtL|tL", 2, 2, 0, "one loss", 5),
        ("Ett|tL", 2, 2, 0, "layers", 4),
        ("Et|tL", 2, 4, 0, "layers", 5),
        ("Et|tmL", 2, 2, 0, "predictions", 4),
        ("Et|mtL", 2, 2, 1, "layers before predictions", 4),
        ("Et|t|m|L", 2, 2, 1, None, None),
        ("Et|tm||L", 2, 2, 1, "predictions in last chunks", 4),
        ("Et|t|m|mL", 2, 2, 2, "predictions together", 7),
    ],
)  # fmt: skip
def test_refusals_name_the_place(
    text: str, pp: int, layers: int, predictions: int, rule: str | None, place: int | None
) -> None:
    """By the character that is wrong, or the end where something is missing."""
    try:
        layout = parse_layout(text)
        layout.check_against_model(pp, max(len(layout.chunks) // pp, 1), layers, predictions)
    except LayoutError as error:
        assert (error.rule, error.position) == (rule, place)
        assert str(error).startswith(f"at character {error.position + 1}: ")
    else:
        assert rule is None


def test_endless_repetitions_are_refused() -> None:
    """Megatron would take all memory."""
    for text in ("Et*99999999|L", "E(t|)*" + "9" * 5000 + "L", "E((t*1000)*1000)*1000"):
        with pytest.raises(LayoutError, match="longer than 1,000,000 letters") as refused:
            parse_layout(text)
        assert refused.value.rule == "length"
    assert parse_layout("Et*00002|L").layers_by_chunk == (2, 0)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(0, 2))
def test_layouts_come_back_from_their_text(layers: list[int], predictions: int) -> None:
    """Whatever is repeated."""
    layout = PipelineLayout.of_layers(layers, predictions)
    again = parse_layout(layout.text)
    assert again.chunks == layout.chunks
    assert again.layers_by_chunk == tuple(layers)
    again.check_against_model(1, len(layers), sum(layers), predictions)
