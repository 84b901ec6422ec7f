"""Numbers as people write them: ``1K`` GPUs, ``8K`` tokens of a sequence, a batch of ``4M tokens``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import typer

from mofa.specs.written_counts import batch_in_sequences as batch_in_sequences
from mofa.specs.written_counts import parse_count as parse_count


def whole_number_parser(example: str) -> Callable[[str | int], int]:
    """A parser of an option's whole number, with an example for its errors."""

    def parse(text: str | int) -> int:
        try:
            return parse_count(str(text), example)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def size_of_cluster_parser(example: str) -> Callable[[str | int], int]:
    """A parser of one number of GPUs or nodes, with an example for its errors.

    A comma is refused: it stands between several numbers, in ``mofa goodput``, and between digits elsewhere.
    """
    parse = whole_number_parser(example)

    def parse_size(text: str | int) -> int:
        if "," in str(text):
            alone = str(text).replace(",", "").strip()
            instead = f"{alone[:20]} if it is one" if alone.isascii() and alone.isdigit() else f"one, such as {example}"
            raise typer.BadParameter(f"{str(text)[:20]!r} has a comma, and this is one number; write {instead}")
        return parse(text)

    return parse_size


def parse_file_and_plan_number(text: str) -> tuple[Path, int | None]:
    """A file of results, and which of its plans, as ``plan.json:2``; a file whose name ends so is itself.

    Raises
    ------
    SpecError
        If there is a number and no file.

    Examples
    --------
    >>> [(str(file), number) for file, number in map(parse_file_and_plan_number, ("plan.json:2", "plan.json"))]
    [('plan.json', 2), ('plan.json', None)]
    """
    from mofa.errors import SpecError
    from mofa.specs.limited_reads import is_plain_file

    before, colon, after = text.rpartition(":")
    if colon and after.isascii() and after.isdigit() and not is_plain_file(Path(text)):
        if not before.strip():
            raise SpecError(
                f"{text[:40]}: the plan's file is missing; write it before the colon, as plan.json{text[:40]}"
            )
        return Path(before), int(after[:9])
    return Path(text), None


def checked_global_batch_text(text: str | int) -> str:
    """A parser of a global batch, in sequences or in tokens; checked, and read when the sequence's length is known.

    >>> [checked_global_batch_text(text) for text in ("1K", "4M tokens", "4Mtokens")]
    ['1K', '4M tokens', '4M tokens']
    """
    words = re.sub(r"(?<=[\dkKmMgGtT])(tokens?|sequences?)$", r" \1", str(text).strip()).split()
    if words[1:] in ([], ["tokens"], ["token"], ["sequences"], ["sequence"]):
        try:
            parse_count(words[0] if words else "", '1024, 1K or "4M tokens"')
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return " ".join(words)
    raise typer.BadParameter(f'{str(text)[:30]!r} is no batch; write sequences, as 1024 or 1K, or "4M tokens"')


def count_gpus(cluster: str, gpus: int | None, nodes: int | None) -> int:
    """How many GPUs ``--gpus`` or ``--nodes`` says.

    Raises
    ------
    SpecError
        If neither or both are given, or there is no such node.
    """
    from mofa.errors import SpecError
    from mofa.specs.load import load_cluster

    if gpus is not None and nodes is not None:
        raise SpecError(f"--nodes: is {nodes:,}, but --gpus is {gpus:,}; give one of them")
    if gpus is not None:
        return gpus
    if nodes is None:
        raise SpecError("--gpus: is missing; say how many GPUs, such as --gpus 64, or how many nodes by --nodes 8")
    return nodes * load_cluster(cluster, 1).node.gpus_per_node
