"""What the name of an op says of it: blocks spell names after roles, which tests that make ops by hand do as well."""

from __future__ import annotations

from mofa.blocks.op import Op
from mofa.blocks.roles import Role

ENDS: dict[str, Role] = {
    "backward": "backward", "dleft": "backward", "dright": "backward", "dgrad": "dgrad", "wgrad": "wgrad",
    "grad_cast": "grad_cast", "whole": "whole", "accumulate": "accumulate",
}  # fmt: skip


def role_of(name: str) -> Role:
    """The role that a name says."""
    if " again for " in name:
        return "regather"
    return "sum" if name.startswith("accumulate ") else ENDS.get(name.rpartition(".")[2], "") if "." in name else ""


def as_named(op: Op, name: str = "") -> Op:
    """An op, or a copy of it of another name, that does what its name says."""
    name = name or op.name
    return op._replace(name=name, role=role_of(name), repeated=name.endswith("~"))
