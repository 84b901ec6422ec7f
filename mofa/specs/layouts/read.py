"""What a strategy's ``layout`` says: Megatron's string, options of a framework's own split, or lists of modules."""

from __future__ import annotations

from functools import lru_cache

from mofa.specs.layouts.framework_split import SplitOptions, SplitRule, parse_split_options
from mofa.specs.layouts.module_names import ModuleNamesError, parse_module_names
from mofa.specs.layouts.pipeline_layout import LayoutError, PipelineLayout, parse_layout


@lru_cache(maxsize=1024)
def parse_layout_or_split(text: str) -> PipelineLayout | SplitOptions:
    """A layout, or the options from which it follows once layers and degrees are known.

    Raises
    ------
    LayoutError, SplitError, ModuleNamesError
        All of them a ``ValueError``, which says where in the text.

    Examples
    --------
    >>> parse_layout_or_split("Et|tL").layers_by_chunk
    (1, 1)
    >>> parse_layout_or_split("decoder-last-pipeline-num-layers:3").layers_of_last
    3
    """
    if is_module_name_list(text):
        return parse_module_names(text)
    options = parse_split_options(text)
    return parse_layout(text) if options is None else options


@lru_cache(maxsize=1024)
def read_layout(text: str, pp: int, vpp: int, num_layers: int, num_predictions: int, rule: SplitRule) -> PipelineLayout:
    """The layout that a text says of a model on a pipeline.

    Parameters
    ----------
    rule
        Of the framework that runs it: its own options alone are read.

    Raises
    ------
    ValueError
        Where the framework refuses it; the message says where in the text.

    Examples
    --------
    >>> from mofa.specs.layouts.framework_split import MEGATRON_SPLIT
    >>> read_layout("decoder-first-pipeline-num-layers:1", 2, 1, 3, 0, MEGATRON_SPLIT).text
    'Et|ttL'
    """
    parsed = parse_layout_or_split(text)
    if isinstance(parsed, SplitOptions):
        if parsed.rule != rule:
            raise ValueError(f"is {parsed.rule.owner}'s, the framework {rule.owner}; write the layout itself")
        return PipelineLayout.of_layers(parsed.layers_by_chunk(num_layers, pp, vpp), num_predictions)
    try:
        parsed.check_against_model(pp, vpp, num_layers, num_predictions)
    except LayoutError as error:
        if is_module_name_list(text):  # its parts have no places in a text
            raise ModuleNamesError(error.what) from None
        raise
    if rule.counts_ends and not (parsed.chunks[0].startswith("E") and parsed.chunks[-1].endswith("L")):
        raise ValueError("has a part without a module at an end, which torchtitan's models have; put E first, L last")
    return parsed


def is_module_name_list(text: str) -> bool:
    """Whether a text is a list of module names."""
    return text.lstrip().startswith("[")


def num_chunks_of_layout_text(text: str) -> int | None:
    """Chunks of the layout that a text says; None where they follow from degrees. [-]

    >>> num_chunks_of_layout_text("Et|(tt|)*2L")
    4
    """
    parsed = parse_layout_or_split(text)
    return None if isinstance(parsed, SplitOptions) else len(parsed.chunks)
