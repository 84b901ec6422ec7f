"""What a launch says beside a program's arguments: its environment and its GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from mofa.export.arguments import Argument
from mofa.export.shell import ShellScript
from mofa.units import is_whole_number

_SBATCH = re.compile(r"^#SBATCH\s+(--[a-z-]+|-[A-Za-z])[=\s]\s*(\S+)", re.MULTILINE)
_OPTION = re.compile(r"--([a-z][a-z_-]*)(?:=(.*))?", re.DOTALL)


def environment_values(script: ShellScript, arguments: Sequence[Argument]) -> dict[str, str]:
    """Values of environment variables that a script sets, by name."""
    out = {}
    for argument in arguments:
        for name in (argument.name[1:], *(alias[1:] for alias in argument.aliases)):
            if name in script.arrays:
                out[name] = " ".join(text for word in script.arrays[name][:1] for text in script.expand_word(word))
    return out


def num_gpus_of_launch(words: Sequence[str], text: str) -> int | None:
    """GPUs of a launch: processes of a node times nodes, as torchrun's words or Slurm's lines say. [-]

    Examples
    --------
    >>> num_gpus_of_launch(["torchrun", "--nproc_per_node=8", "--nnodes", "2", "train.py"], "")
    16
    """
    options: dict[str, str] = {}
    for word, following in pairwise([*words, ""]):
        if match := _OPTION.fullmatch(word):
            options[match[1].replace("_", "-")] = following if match[2] is None else match[2]
    slurm = {name.lstrip("-"): value for name, value in _SBATCH.findall(text)}
    per_node = options.get("nproc-per-node") or slurm.get("gpus-per-node") or slurm.get("ntasks-per-node")
    nodes = options.get("nnodes") or slurm.get("nodes") or slurm.get("N") or "1"
    if per_node is None or not is_whole_number(per_node) or not is_whole_number(nodes):
        return None
    return int(per_node) * int(nodes)
