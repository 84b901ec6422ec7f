"""torchtitan's lists of module names, and texts of all sorts."""

from __future__ import annotations

import json

import pytest

from mofa.specs.layouts.framework_split import MEGATRON_SPLIT, TORCHTITAN_SPLIT
from mofa.specs.layouts.module_names import ModuleNamesError, module_names_by_chunk, parse_module_names
from mofa.specs.layouts.pipeline_layout import LayoutError, PipelineLayout
from mofa.specs.layouts.read import num_chunks_of_layout_text, read_layout


def test_lists_come_back_from_their_layout() -> None:
    """As torchtitan's generate_llm_fqn_per_model_part writes them."""
    layout = PipelineLayout.of_layers([1, 2, 1, 0])
    names = module_names_by_chunk(layout)
    assert names == [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3"], ["norm", "output"]]
    assert parse_module_names(json.dumps(names)).chunks == layout.chunks
    assert parse_module_names('[["layers.1", "tok_embeddings", "layers.0", "output", "norm"]]').text == "EttL"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[["tok_embeddings"', "is no JSON"),
        ('["tok_embeddings"]', "is no list of lists"),
        ("[]", "has no parts"),
        ('[["layers.0"], ["norm", "output"]]', "part 0: tok_embeddings is named 0 times"),
        ('[["tok_embeddings"], ["norm", "output", "tok_embeddings"]]', "part 1: tok_embeddings is named 1 times"),
        ('[["tok_embeddings", "norm"], ["output"]]', "part 0: norm is named 1 times; name it once, in part 1"),
        ('[["tok_embeddings", "layers.1"], ["norm", "output"]]', "part 0: layers.1 where layers.0 comes next"),
        ('[["tok_embeddings", "layers.x"], ["norm", "output"]]', "part 0: 'layers.x' is no module"),
    ],
)
def test_lists_that_are_no_model_are_refused(text: str, why: str) -> None:
    """With the part."""
    with pytest.raises(ModuleNamesError, match=why):
        parse_module_names(text)


def test_a_text_of_any_kind_gives_the_same_layout() -> None:
    """Megatron's string, its options and torchtitan's lists."""
    wanted = ("Et", "ttt", "ttL")
    lists = json.dumps(module_names_by_chunk(PipelineLayout.of_chunks(wanted)))
    for text in ("Et|t*3|ttL", "decoder-first-pipeline-num-layers:1+decoder-last-pipeline-num-layers:2"):
        assert read_layout(text, 3, 1, 6, 0, MEGATRON_SPLIT).chunks == wanted
    assert read_layout(lists, 3, 1, 6, 0, TORCHTITAN_SPLIT).chunks == wanted
    assert [
        num_chunks_of_layout_text(text) for text in (lists, "Et|t*3|ttL", "decoder-first-pipeline-num-layers:1")
    ] == [3, 3, None]


def test_what_a_framework_cannot_run_is_refused() -> None:
    """By its own words."""
    with pytest.raises(ValueError, match="is torchtitan's, the framework megatron"):
        read_layout("pipeline_parallel_last_stage_less_layers:2", 2, 1, 6, 0, MEGATRON_SPLIT)
    with pytest.raises(ModuleNamesError, match=r"it has 1 t .*, the model has 2"):
        read_layout('[["tok_embeddings", "layers.0"], ["norm", "output"]]', 2, 1, 2, 0, TORCHTITAN_SPLIT)
    with pytest.raises(ValueError, match="put E first, L last"):
        read_layout("|Et|tL", 3, 1, 2, 0, TORCHTITAN_SPLIT)
    assert read_layout("|Et|tL", 3, 1, 2, 0, MEGATRON_SPLIT).layers_by_chunk == (0, 1, 1)
    with pytest.raises(LayoutError, match="at character 3: a decoder layer is behind"):
        read_layout("EmtL", 1, 1, 1, 1, MEGATRON_SPLIT)
