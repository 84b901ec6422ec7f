"""Published rows on Hopper that run Megatron-Core on Transformer Engine: the sets that they are judged in.

A row's columns and its recipe say where it belongs, never its error.
"""

from __future__ import annotations

from typing import Literal

from mofa.validate.reference import Switch
from mofa.validate.validation_report import RunScore

Set = Literal["dense bf16", "dense fp8", "with experts"]
SETS: tuple[Set, ...] = ("dense bf16", "dense fp8", "with experts")
MEAN_AIM = {"dense bf16": 0.04, "dense fp8": 0.04}
"""What the mean of the absolute errors of a set should not exceed. [-]"""
ROW_AIM = {"with experts": 0.10}
"""What no row's error should exceed where there are too few for a mean. [-]"""
HOPPER = ("h100", "h200", "h800")
SWITCHES: dict[Switch, str] = {
    "tp_overlap": "tensor-parallel communication beside products (user buffers)",
    "expert_overlap": "experts' exchanges beside other micro-batches' computing",
    "layout": "layers laid out over pipeline stages by hand",
}
"""What runs on Transformer Engine were never made with."""


def is_hopper_row(run: RunScore) -> bool:
    """Whether a run is a published row on Hopper and Transformer Engine with a step time."""
    published = run.group.startswith("published-") and run.step_time is not None
    return published and run.library == "transformer-engine" and run.gpu.lower().startswith(HOPPER)


def hopper_set_of_run(run: RunScore) -> Set | None:
    """The set that a run is judged in, None where it is none of them."""
    if not is_hopper_row(run) or run.switches or run.is_filled_by_rule:
        return None
    if run.has_experts:
        return "with experts"
    return "dense bf16" if run.gemm == "bf16" else "dense fp8"


def why_in_no_hopper_set(run: RunScore) -> str:
    """The switches, and the rule, that keep a Hopper row out of the sets, in words."""
    by_rule = ["a rule fills what its source leaves open"] if run.is_filled_by_rule else []
    return "; ".join([*(SWITCHES[switch] for switch in run.switches), *by_rule])
