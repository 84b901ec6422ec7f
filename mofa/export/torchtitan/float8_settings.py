"""torchtitan's settings of linears in fp8: the converter, and how torchao scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mofa.export.arguments import Argument, FieldRow, GivenArguments
from mofa.export.job import ExportJob

CONVERTERS = Argument("model.converters", "texts", [])
_FLOAT8 = "quantize.linear.float8"
RECIPE = Argument(f"{_FLOAT8}.recipe_name", "text")
FILTERS = Argument(f"{_FLOAT8}.filter_fqns", "texts", [])
GATHERS = Argument(f"{_FLOAT8}.enable_fsdp_float8_all_gather", "flag", False)
AHEAD = Argument(f"{_FLOAT8}.precompute_float8_dynamic_scale_for_fsdp", "flag", False)
RECIPES: dict[str, str | None] = {
    "fp8-tensorwise": None, "fp8-rowwise": "rowwise", "fp8-rowwise-gw-hp": "rowwise_with_gw_hp",
}  # fmt: skip
"""By ``precision.gemm``. A recipe's name excludes gathers in fp8, and without one torchao scales by tensor."""


def _write_float8(job: ExportJob) -> Mapping[str, Any]:
    gemm, framework = job.workload.precision.gemm, job.framework
    if gemm == "bf16":
        if framework.fp8_all_gather or framework.fp8_filter != "output":
            raise job.refusal("framework.fp8_all_gather or fp8_filter in bf16", "they change nothing; leave them out")
        return {}
    if gemm not in RECIPES:
        raise job.refusal(f"precision.gemm ({gemm})", f"torchao has {', '.join(RECIPES)}; use one of them or bf16")
    chosen: dict[str, Any] = {CONVERTERS.name: [_FLOAT8], FILTERS.name: list(framework.fp8_filters)}
    if (name := RECIPES[gemm]) is not None:
        chosen[RECIPE.name] = name
    if framework.fp8_all_gather:
        chosen |= {GATHERS.name: True, AHEAD.name: framework.fp8_scales_ahead}
    return chosen


def _read_float8(given: GivenArguments) -> Mapping[str, Any]:
    converters = list(given[CONVERTERS.name])
    if not converters:
        return {"precision.gemm": "bf16"}
    if converters != [_FLOAT8]:
        raise given.refusal(f"{CONVERTERS.name} ({', '.join(converters)}) is not modelled", f"what is: {_FLOAT8}")
    named = "tensorwise" if given[RECIPE.name] is None else given[RECIPE.name]
    own = {word or "tensorwise": gemm for gemm, word in RECIPES.items()}
    if named not in own:
        raise given.refusal(f"{RECIPE.name} ({named}) is unknown", f"use {', '.join(own)}")
    if given[GATHERS.name] and given[RECIPE.name] is not None:
        raise given.refusal(
            f"{GATHERS.name} with {RECIPE.name} ({given[RECIPE.name]})", "torchtitan refuses both; leave one out"
        )
    gathers = bool(given[GATHERS.name])
    return {
        "precision.gemm": own[named],
        "framework.fp8_filter": "+".join(given[FILTERS.name]),
        "framework.fp8_all_gather": gathers,
        "framework.fp8_scales_ahead": gathers and bool(given[AHEAD.name]),
    }


FLOAT8_ROW = FieldRow(
    ("precision.gemm", "framework.fp8_filter", "framework.fp8_all_gather", "framework.fp8_scales_ahead"),
    (CONVERTERS, RECIPE, FILTERS, GATHERS, AHEAD), _write_float8, _read_float8,
)  # fmt: skip
