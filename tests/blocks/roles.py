"""What the name of an op says of it: blocks spell names after roles, which tests that make ops by hand do as well."""

from __future__ import annotations

import re

from mofa.blocks.op import Op
from mofa.blocks.roles import Part, Purpose, Role

ENDS: dict[str, Role] = {
    "backward": "backward", "dleft": "backward", "dright": "backward", "dgrad": "dgrad", "wgrad": "wgrad",
    "grad_cast": "grad_cast", "whole": "whole", "accumulate": "accumulate",
}  # fmt: skip


def role_of(name: str) -> Role:
    """The role that a name says."""
    if " again for " in name:
        return "regather"
    return "sum" if name.startswith("accumulate ") else ENDS.get(name.rpartition(".")[2], "") if "." in name else ""


PARTS: dict[str, Part] = {"experts": "experts", "loss": "loss", "fsdp": "fsdp", "efsdp": "fsdp"}
"""What issues an op, by what its name begins with."""
CLAIMS = {
    "fsdp.turn": "fsdp.next", "efsdp.turn": "efsdp.next", "fsdp.turn@": "fsdp.next@", "efsdp.turn@": "efsdp.next@",
    "fsdp.previous": "fsdp.reduce_input",
}  # fmt: skip
"""Marks that take over what the block before held."""
ORIGINS = ("backward", "dgrad", "wgrad", "grad_cast", "whole", "accumulate")
"""Roles of ops that are of one op of the forward, unless FSDP issues them for a group."""


def part_of(name: str) -> Part:
    """What a name says of what issues an op."""
    return PARTS.get(re.split(r"[.~#]", name)[0], "")


def purpose_of(name: str) -> Purpose | None:
    """What a name says an op is for, None for those of which names say nothing."""
    if name.endswith((".weight_cast", ".weight_cast~")):
        return "weight_cast"
    if name.startswith("fsdp.hold"):
        return "hold"
    if name.endswith(".copy_out"):
        return "experts_copy_out" if name.startswith("efsdp.weights") else "copy_out"
    if name.startswith("dispatcher renewed"):
        return "renewal"
    return "embedding_gradient" if name == "embedding.backward" else None


def origin_of(name: str) -> str:
    """The op of the forward that a name says it differentiates or repeats; else, as of FSDP's or a zero-filled sum,
    empty."""
    if name.endswith("~"):
        return name.removesuffix("~")
    if part_of(name) == "fsdp" or role_of(name) not in ORIGINS or name.startswith("dW:"):
        return ""
    return "" if name.endswith((".zeros.whole", ".copy.whole")) else name.rpartition(".")[0]


def as_named(op: Op, name: str = "") -> Op:
    """An op, or a copy of it of another name, that does what its name says."""
    name = name or op.name
    return op._replace(
        name=name, role=role_of(name), repeated=name.endswith("~"), origin=origin_of(name), part=part_of(name),
        purpose=purpose_of(name) or op.purpose, claims=CLAIMS.get(name, ""),
    )  # fmt: skip
