"""What the recipe behind a published row says beyond its columns: gradients, loss, fp8, kernels, overlaps.

The options are data, with their source: ``reference_runs/published/recipes/options.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from mofa.specs.base import Spec
from mofa.specs.cuda_graphs import CudaGraphs
from mofa.specs.files import load_yaml
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.workload import OLD_FP8
from mofa.validate.architecture import Row, is_mlperf_gpt3, source_of_row, whole_number_in_column

FILE = Path(__file__).resolve().parents[2] / "reference_runs" / "published" / "recipes" / "options.yaml"

Source = Annotated[str, Field(min_length=10)]
Options = dict[str, bool | int | str]


class SourceAndModelSelector(Spec):
    """Rows of some sources, and of models whose names begin as a pattern says."""

    sources: tuple[str, ...]
    models: str = ""

    def covers(self, row: Row) -> bool:
        """Whether a row is one of them."""
        return source_of_row(row) in self.sources and re.match(self.models, row["model"]) is not None


class RowSelector(SourceAndModelSelector):
    """Selects the rows that a recipe holds for."""

    source: Source


class RecipeOptions(RowSelector):
    """Options of a framework that hold for rows of these sources and models, in fp8 alone or in any precision."""

    options: Options
    in_fp8: bool = False
    framework_names: str = ""
    """What a row's framework has in its name."""
    of_mlperf_gpt3: bool = False
    """Whether only rows of MLPerf's GPT-3 are meant."""


class OptionsInNotes(Spec):
    """Options that a row's notes name themselves."""

    pattern: str
    options: Options


class ModelCardRecipe(Spec):
    """What the recipe that a model card names says of a model on a GPU."""

    model: str
    gpu: str
    strategy: Options
    framework: Options
    source: Source


class UnmodelledRecipe(RowSelector):
    """Rows whose recipe switches something on that no prediction covers."""

    precision: str
    """As the row's column begins."""
    framework_names: str = ""
    """As of :class:`RecipeOptions`."""
    reason: str

    def holds_for_row(self, row: Row) -> bool:
        """Whether a row runs by it."""
        named = self.framework_names in row["framework"] and row["precision"].startswith(self.precision)
        return named and self.covers(row)


class VirtualStagesOfModels(Spec):
    """Chunks of a stage by model. [-]"""

    sources: tuple[str, ...]
    chunks_by_model: dict[str, int] = Field(alias="chunks")
    source: Source


class FilledColumns(RowSelector):
    """Columns that a row leaves open, as its source's files say them, or as a rule does that was written before any of
    its rows was predicted."""

    columns: dict[str, str]
    """What is filled in where it is blank, by column."""
    where: dict[str, str] = {}
    """Columns that a row must have so; what ``columns`` names as well is written over."""
    framework_names: str = ""
    """As of :class:`RecipeOptions`."""
    section: str = ""
    """What a row's notes say that it stands under."""
    by_rule: bool = False
    """Whether it is a rule, and not read: its rows are a group of their own."""

    def fills(self, row: Row) -> bool:
        """Whether a row has these columns open and is one of those meant."""
        if not self.covers(row) or self.framework_names not in row["framework"] or self.section not in row["notes"]:
            return False
        as_asked = all(row[name] == text for name, text in self.where.items())
        return as_asked and any(not row[name] or name in self.where for name in self.columns)


class RecipeLayouts(RowSelector):
    """Layouts of a recipe's pipelines, and whether nothing was learned from such."""

    texts: dict[str, str] = {}
    """The layout on degrees such as ``16x2``: pp x vpp."""
    by_hand: bool = True
    """Whether its runs count as laid out by hand (:func:`unfitted_switches_of_row`)."""


class Fp8ScalingText(Spec):
    """How a text that a row holds says that fp8 is scaled."""

    pattern: str
    recipe: str


class Recipes(Spec):
    """All recipes of published runs; readings and what rows say in the order in which they are applied."""

    readings: tuple[RecipeOptions, ...]
    said: tuple[OptionsInNotes, ...]
    cards: tuple[ModelCardRecipe, ...]
    unmodelled: tuple[UnmodelledRecipe, ...]
    bf16_moments: tuple[RowSelector, ...]
    """Models whose recipe holds Adam's moments in bf16."""
    token_drop: tuple[RowSelector, ...]
    """Models whose recipe drops tokens beyond a capacity, where their names do not say so."""
    virtual_stages: tuple[VirtualStagesOfModels, ...]
    layouts: tuple[RecipeLayouts, ...]
    """Models whose layers a recipe lays out over stages."""
    filled: tuple[FilledColumns, ...]
    """What rows leave open and their sources, or rules, fill."""
    scalings: tuple[Fp8ScalingText, ...]
    current_scaling: tuple[RowSelector, ...]
    """Models that run current scaling where a row says no more than fp8."""


@lru_cache(maxsize=1)
def load_recipes() -> Recipes:
    """The recipes beside the published runs.

    Examples
    --------
    >>> load_recipes().virtual_stages[0].chunks_by_model["LLAMA2-70B"]
    20
    """
    return spec_from_mapping(Recipes, load_yaml(FILE), FILE.name)


def model_card_recipe(model: str, gpu: str) -> ModelCardRecipe | None:
    """The card of a model on a GPU."""
    return next((card for card in load_recipes().cards if (card.model, card.gpu) == (model, gpu)), None)


def virtual_stages_of_row(row: Row) -> int | None:
    """Chunks of a stage where a row's table has no column of them. [-]"""
    known: Sequence[Mapping[str, int]] = [
        item.chunks_by_model for item in load_recipes().virtual_stages if source_of_row(row) in item.sources
    ]
    return next((chunks[row["model"]] for chunks in known if row["model"] in chunks), None)


def holds_bf16_moments(row: Row) -> bool:
    """Whether a row's recipe holds Adam's moments in bf16."""
    return any(rows.covers(row) for rows in load_recipes().bf16_moments)


def fp8_scaling_of_row(row: Row) -> str:
    """How a row in fp8 scales."""
    said = f"{row['precision']} {row['notes']}"
    recipes = load_recipes()
    named = next((scaling.recipe for scaling in recipes.scalings if re.search(scaling.pattern, said)), None)
    if named is None and any(rows.covers(row) for rows in recipes.current_scaling):
        return "fp8-tensorwise"
    return named or OLD_FP8


def framework_options_of_row(row: Row, gpu: str, *, in_fp8: bool) -> dict[str, Any]:
    """Options of the framework that a row's recipe and its notes say.

    Parameters
    ----------
    row
        Of the table.
    gpu
        Its GPU, as profiles are looked up.
    in_fp8
        Whether its products are.
    """
    options: dict[str, Any] = {}
    recipes = load_recipes()
    for reading in recipes.readings:
        if _applies(reading, row, in_fp8):
            options |= reading.options
    for said in recipes.said if source_of_row(row) in MEGATRON else ():
        if re.search(said.pattern, f"{row['overlap_notes']}; {row['notes']}"):
            options |= said.options
    if whole_number_in_column(row, "tp") == 1:
        options.pop("tp_overlap", None)
    if not in_fp8:
        options.pop("fp8_params", None)
    card = model_card_recipe(row["model"], gpu)
    return options | (card.framework if card else {})


def _applies(reading: RecipeOptions, row: Row, in_fp8: bool) -> bool:
    """Whether a row runs with what a reading says."""
    named = reading.framework_names in row["framework"] and (not reading.of_mlperf_gpt3 or is_mlperf_gpt3(row))
    return reading.covers(row) and named and (in_fp8 or not reading.in_fp8)


MEGATRON = ("bridge", "bridgecard", "nemo", "nemodoc", "nemolauncher", "mlperf", "mcore08", "mlmllama", "simumax")
"""Sources of Megatron-Core on Transformer Engine."""


def hides_expert_exchanges(row: Row) -> bool:
    """Whether a row's experts exchange tokens beside other micro-batches' computing."""
    return re.search(HIDDEN_EXCHANGES, row["overlap_notes"]) is not None


HIDDEN_EXCHANGES = r"a2a overlap=on|EP overlap on"
"""How rows say so."""


GRAPHS = re.compile(
    r"cuda_graph=(?P<by>transformer_engine|local|full_iteration):?(?P<of>\[[^\]]*\]|[a-z_+]*)"
    r"|(?<![nN]o )(?P<te>TE CUDA graphs) (?P<parts>[a-z_,+]+)|(?P<full>full-iteration CUDA graphs)"
)
"""How rows say what their CUDA graphs hold: by Megatron-Bridge's ``cuda_graph_impl`` and ``cuda_graph_scope``, or in
words."""


def cuda_graphs_of_row(row: Row) -> str | None:
    """What a row's graphs hold, as ``framework.cuda_graphs`` says it; empty without any, None if it is not understood.

    Examples
    --------
    >>> said = "cuda_graph=transformer_engine:['attn', 'moe_router']; dispatcher=hybridep"
    >>> cuda_graphs_of_row({"overlap_notes": said, "notes": ""})
    'te:attn+moe_router'
    >>> cuda_graphs_of_row({"overlap_notes": "cuda_graph=full_iteration:[]", "notes": "no CUDA graphs"})
    'local:full_iteration'
    """
    said = f"{row['overlap_notes']} {row['notes']}"
    match = GRAPHS.search(said)
    if match is None:
        return None if re.search(r"cuda_graph=|(?<![nN]o )CUDA graphs", said) else ""
    if match["full"] or match["by"] == "full_iteration" or (match["by"] == "local" and "full_iteration" in match["of"]):
        return "local:full_iteration"
    parts = re.findall(r"[a-z_]+", match["parts"] or match["of"] or "")
    text = ("te" if match["te"] or match["by"] == "transformer_engine" else "local") + (":" if parts else "")
    text += "+".join(PREPROCESS.get(part, part) for part in parts)
    try:
        return str(CudaGraphs.parse(text))
    except ValueError:
        return None


PREPROCESS = {"preprocess": "moe_preprocess"}
"""What a card calls otherwise than Megatron-Core does."""


def unfitted_switches_of_row(row: Row, options: dict[str, Any]) -> list[str]:
    """The row's switches for which no constant was fitted on Transformer Engine: ``tp_overlap``, ``expert_overlap``,
    ``layout``."""
    switches = ["tp_overlap"] if options.get("tp_overlap") else []
    switches += ["expert_overlap"] if options.get("expert_overlap") else []
    laid_out = any(rows.by_hand and rows.covers(row) for rows in load_recipes().layouts)
    return [*switches, "layout"] if laid_out and (whole_number_in_column(row, "pp") or 1) > 1 else switches


def layout_of_row(row: Row, pp: int, vpp: int) -> str:
    """The layout that a row's recipe has on these degrees; empty where it leaves the split to the framework."""
    degrees = f"{pp}x{vpp}"
    texts = [rows.texts[degrees] for rows in load_recipes().layouts if rows.covers(row) and degrees in rows.texts]
    text = texts[0] if texts else ""
    return text.replace("m", "") if "w/o mtp" in row["model"].lower() else text


def why_row_is_implausible(row: Row) -> str | None:
    """Why a row's configuration cannot be the one that ran, or None.

    GPT-OSS 120B on H100 has micro-batches of 1 in every version of its recipe (scripts/performance/configs/gpt_oss of
    v0.2.0 to v0.5.0), which computes its norms and activations again; 4 is that of B200 and GB200.
    """
    of_4 = source_of_row(row) == "bridge" and row["gpu"] == "H100" and row["mbs"] == "4" and not row["recompute"]
    if of_4 and re.match("GPT.?OSS.?120B", row["model"], re.IGNORECASE):
        return "its micro-batch is not that of any version of its recipe"
    return None


def why_recipe_of_row_is_unmodelled(row: Row) -> str | None:
    """What a row's recipe switches on that is not modelled, where the row does not say so itself, or None."""
    return next((recipe.reason for recipe in load_recipes().unmodelled if recipe.holds_for_row(row)), None)


def routing_of_row(row: Row) -> dict[str, Any]:
    """How tokens fall on experts where a row says more than that they are balanced.

    ``apply_moe_token_drop`` of Megatron-Bridge (training/utils/moe_token_drop.py) and NeMo's callback: a capacity of 1,
    padded to it.
    """
    drops = "tokendrop" in row["model"].lower() or any(rows.covers(row) for rows in load_recipes().token_drop)
    return {"capacity_factor": 1.0, "pad_to_capacity": True} if drops else {}


def etp_of_row(row: Row) -> int | None:
    """Ranks that share an expert where the table has no column of them: 1 in all of Megatron-Bridge's configs."""
    given = whole_number_in_column(row, "etp")
    return 1 if given is None and row["moe_experts"] and source_of_row(row) == "bridge" else given


def why_row_is_unmodelled(row: Row, patterns: Sequence[tuple[str, str]]) -> str | None:
    """The reason of the first pattern that a row's notes hold."""
    said = f"{row['overlap_notes']} {row['notes']}"
    return next((reason for pattern, reason in patterns if re.search(pattern, said)), None)
