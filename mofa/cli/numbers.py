"""Numbers as people write them: ``1K`` GPUs, ``8K`` tokens of a sequence, a batch of ``4M tokens``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from mofa.specs.hardware import ClusterSpec

_PREFIXES = {"": 1, "k": 2**10, "m": 2**20}
_COUNT = re.compile(r"(\d{1,3}(?:[,_]\d{3})+|\d{1,12})(?:\.(\d{1,6}))?\s*([kKmM]?)i?")
MOST = 2**40


def parse_count(text: str, example: str) -> int:
    """A whole number of at least 1; K is 1024 and M 1024 K, as of GPUs, sequences and batches.

    Raises
    ------
    ValueError
        If it is none.

    Examples
    --------
    >>> parse_count("1K", "64"), parse_count("8k", "8K"), parse_count("1,024", "64"), parse_count("1.5K", "64")
    (1024, 8192, 1024, 1536)
    >>> parse_count("0", "64 or 1K")
    Traceback (most recent call last):
    ValueError: must be at least 1; write it as 64 or 1K
    """
    match = _COUNT.fullmatch(text.strip().removeprefix("-"))
    if match is not None and text.strip().startswith("-"):
        raise ValueError(f"must be at least 1; write it as {example}")
    if match is None:
        raise ValueError(f"{text[:20]!r} is no whole number; write it as {example}")
    digits, decimals, prefix = match.groups()
    scale, places = _PREFIXES[prefix.lower()], len(decimals or "")
    written = int(re.sub("[,_]", "", digits) + (decimals or ""))
    number, rest = divmod(written * scale, int(10**places))
    if rest:
        raise ValueError(f"{text[:20]!r} is no whole number; write it as {example}")
    if not 1 <= number <= MOST:
        raise ValueError(f"must be at {'least 1' if number < 1 else f'most {MOST:,}'}; write it as {example}")
    return number


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


def global_batch_parser(text: str | int) -> str:
    """A parser of a global batch, in sequences or in tokens; checked, and read when the sequence's length is known.

    >>> [global_batch_parser(text) for text in ("1K", "4M tokens", "4Mtokens")]
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


def batch_in_sequences(text: str | int, seq_len: int) -> int:
    """A global batch in sequences.

    Raises
    ------
    SpecError
        If it is in tokens and no whole number of sequences.

    Examples
    --------
    >>> batch_in_sequences("4M tokens", 8192), batch_in_sequences("1K", 8192), batch_in_sequences(8, 8192)
    (512, 1024, 8)
    """
    from mofa.errors import SpecError

    number, *unit = str(text).split()
    size = parse_count(number, "1024")
    if not unit or unit[0].startswith("seq"):
        return size
    sequences, rest = divmod(size, seq_len)
    if rest or not sequences:
        near = max(round(size / seq_len), 1)
        raise SpecError(
            f"--global-batch: {size:,} tokens are {size / seq_len:,.2f} sequences of {seq_len:,}; "
            f'write {near} (or "{near * seq_len} tokens"; M is 1024 x 1024)'
        )
    return sequences


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


def with_memory_limit(machines: ClusterSpec, text: str | None) -> ClusterSpec:
    """Machines whose GPUs have so much memory for a plan and its margin; as they are where nothing is said.

    Raises
    ------
    SpecError
        If it is no size, or more than the GPU has.
    """
    from mofa.errors import SpecError
    from mofa.specs.base import Fact
    from mofa.units import format_bytes, parse_quantity

    if text is None:
        return machines
    try:
        limit_bytes = parse_quantity(text, "B")
    except ValueError as error:
        raise SpecError(f"--memory-limit: {error}") from None
    capacity_bytes = machines.gpu.capacity_bytes.value
    if not 0 < limit_bytes <= capacity_bytes:
        raise SpecError(
            f"--memory-limit: {text} is {'no memory' if limit_bytes <= 0 else 'more'} "
            f"{'' if limit_bytes <= 0 else f'than the {format_bytes(capacity_bytes)} of {machines.gpu.name}'}".rstrip()
            + f"; give at most {format_bytes(capacity_bytes)}"
        )
    fact = Fact(value=limit_bytes, provenance="assumed", source="--memory-limit")
    return machines.model_copy(update={"gpu": machines.gpu.model_copy(update={"capacity_bytes": fact})})
