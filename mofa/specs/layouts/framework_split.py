"""How frameworks split layers over virtual chunks by themselves, from degrees and from their options."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class SplitRule:
    """How a framework splits layers over chunks by itself."""

    owner: str
    """Whose rule it is, as messages call it."""
    counts_ends: bool
    """Whether embedding and head count as layers, chunks may differ by one, and no chunk is without a module."""


MEGATRON_SPLIT, TORCHTITAN_SPLIT = SplitRule("megatron", counts_ends=False), SplitRule("torchtitan", counts_ends=True)
OPTIONS: dict[str, tuple[str, SplitRule]] = {
    "decoder-first-pipeline-num-layers": ("layers_of_first", MEGATRON_SPLIT),
    "decoder-last-pipeline-num-layers": ("layers_of_last", MEGATRON_SPLIT),
    "account-for-embedding-in-pipeline-split": ("counts_embedding", MEGATRON_SPLIT),
    "account-for-loss-in-pipeline-split": ("counts_loss", MEGATRON_SPLIT),
    "pipeline-parallel-first-stage-less-layers": ("less_on_first", TORCHTITAN_SPLIT),
    "pipeline-parallel-last-stage-less-layers": ("less_on_last", TORCHTITAN_SPLIT),
}
"""Frameworks' options by name, each with its field of :class:`SplitOptions` and the rule that it changes."""
_OPTION = re.compile(r"(?:--)?(?:parallelism\.)?([a-z][a-z_-]*)(?:[:=\s]\s*(\d+))?")


class SplitError(ValueError):
    """Layers that a framework cannot split so by itself."""


@dataclass(frozen=True)
class SplitOptions:
    """Options that say how a framework splits layers by itself."""

    rule: SplitRule
    layers_of_first: int | None = None
    layers_of_last: int | None = None
    """Layers of all chunks of the first and of the last rank; other ranks share the rest evenly. [-]"""
    counts_embedding: bool = False
    counts_loss: bool = False
    """Whether the embedding and the loss count as a layer each."""
    less_on_first: int = 1
    less_on_last: int = 1
    """Layers that the embedding and the head count as in torchtitan. [-]"""

    def layers_by_chunk(self, num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
        """Layers of each chunk along the model. (pp * vpp,)

        Raises
        ------
        SplitError
            Where the framework refuses.

        Examples
        --------
        >>> SplitOptions(MEGATRON_SPLIT, layers_of_first=2, layers_of_last=3).layers_by_chunk(13, 4, 1)
        (2, 4, 4, 3)
        >>> SplitOptions(MEGATRON_SPLIT, counts_embedding=True, counts_loss=True).layers_by_chunk(126, 16, 8)[-2:]
        (1, 0)
        """
        if self.rule.counts_ends:
            return torchtitan_layers_by_chunk(num_layers, pp * vpp, self.less_on_first, self.less_on_last)
        if self.layers_of_first is not None or self.layers_of_last is not None:
            return self._with_given_ends(num_layers, pp, vpp)
        counted = num_layers + self.counts_embedding + self.counts_loss
        each = _evenly(counted, pp, vpp, "layers" + " with the embedding and the loss" * (counted > num_layers))
        layers = [each] * (pp * vpp)
        layers[0] -= self.counts_embedding
        layers[-1] -= self.counts_loss
        if min(layers) < 0:
            raise SplitError(f"{num_layers} layers leave less than none on a chunk")
        return tuple(layers)

    def _with_given_ends(self, num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
        """Megatron's uneven pipelines (transformer_config.py, "Uneven PP"): each rank shares its layers evenly."""
        if self.counts_embedding or self.counts_loss:
            raise SplitError("layers of the first or last stage are given, and the embedding or loss counts; keep one")
        ranks: list[int | None] = [None] * pp
        if self.layers_of_first is not None:
            ranks[0] = self.layers_of_first
        if self.layers_of_last is not None:
            if pp == 1 and self.layers_of_first is not None:
                raise SplitError("one stage is first and last; give one number")
            ranks[-1] = self.layers_of_last
        given = [number for number in ranks if number is not None]
        if min(given) < 1:
            raise SplitError("the first and the last stage need a layer each")
        rest, middle = num_layers - sum(given), ranks.count(None)
        if rest < 0 or (rest > 0) != (middle > 0):
            raise SplitError(f"{rest} of {num_layers} layers are left for {middle} stages between")
        each = _evenly(rest, middle, 1, "layers between the ends") if middle else 0
        of_ranks = [each if number is None else number for number in ranks]
        for number in of_ranks:
            _evenly(number, 1, vpp, "layers")
        return tuple(number // vpp for _ in range(vpp) for number in of_ranks)


def megatron_layers_by_chunk(num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Megatron-Core's own split: every chunk has as many layers. (pp * vpp,)

    Raises
    ------
    SplitError
        If they don't divide (megatron_core 0.16.1, transformer/transformer_block.py, ``get_num_layers_to_build``).

    Examples
    --------
    >>> megatron_layers_by_chunk(32, 2, 2)
    (8, 8, 8, 8)
    """
    return SplitOptions(MEGATRON_SPLIT).layers_by_chunk(num_layers, pp, vpp)


def torchtitan_layers_by_chunk(
    num_layers: int, num_chunks: int, less_on_first: int = 1, less_on_last: int = 1
) -> tuple[int, ...]:
    """torchtitan's own split: the first and the last chunk have so many layers less, the first ones one more.

    torchtitan 0.2.2, distributed/pipeline_parallel.py, ``generate_llm_fqn_per_model_part``.

    Raises
    ------
    SplitError
        If a chunk would have nothing, or an end counts more than a chunk has.

    Examples
    --------
    >>> torchtitan_layers_by_chunk(16, 4), torchtitan_layers_by_chunk(16, 4, 2, 2)
    ((4, 5, 4, 3), (3, 5, 5, 3))
    """
    if num_chunks == 1:
        return (num_layers,)
    counted = num_layers + less_on_first + less_on_last
    base, more = divmod(counted, num_chunks)
    if base == 0:
        raise SplitError(f"{num_layers} layers, with ends as {counted}, leave some of {num_chunks} chunks empty")
    if max(less_on_first, less_on_last) > base:
        raise SplitError(f"an end counts as {max(less_on_first, less_on_last)} layers, more than the {base} of a chunk")
    layers = [base + (i < more) for i in range(num_chunks)]
    layers[0] -= less_on_first
    layers[-1] -= less_on_last
    return tuple(layers)


def parse_split_options(text: str) -> SplitOptions | None:
    """Options of a framework's own split, such as ``decoder-first-pipeline-num-layers:7``; None for other texts.

    Several are joined by ``+``, a comma or white space; ``--`` may stand before each, ``=`` or a blank before a number.

    Raises
    ------
    SplitError
        If an option is unknown, lacks its number, or options of two frameworks are mixed.

    Examples
    --------
    >>> parse_split_options("--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5").layers_of_last
    5
    >>> parse_split_options("Ett|ttL") is None
    True
    """
    text = text.strip()
    if not re.match(r"(--|[a-z.]*(first|last|account|decoder|pipeline|parallel))", text):
        return None
    numbers: dict[str, int] = {}
    rules: set[SplitRule] = set()
    place = 0
    while place < len(text):
        option = _OPTION.match(text, place)
        name = option[1].replace("_", "-") if option else text[place:]
        if option is None or name not in OPTIONS:
            from mofa.specs.files import did_you_mean  # loads YAML

            raise SplitError(f"at character {place + 1}: {name[:60]!r} is no option; {did_you_mean(name, OPTIONS)}")
        field, of = OPTIONS[name]
        is_switch = field.startswith("counts")
        if is_switch == (option[2] is not None) or field in numbers:
            wants = "without a number" if is_switch else f"with a number, such as {name}:2"
            raise SplitError(f"at character {place + 1}: {name} is given once, {wants}")
        numbers[field] = 1 if is_switch else int(option[2])
        rules.add(of)
        place = option.end()
        while place < len(text) and text[place] in "+, \t\n":
            place += 1
    if len(rules) > 1:
        raise SplitError("options of Megatron and of torchtitan are mixed; keep those of one")
    return SplitOptions(rules.pop(), **numbers)  # type: ignore[arg-type]


def _evenly(layers: int, pp: int, vpp: int, what: str) -> int:
    """Layers of each chunk where stages and chunks share them evenly."""
    if layers % pp:
        raise SplitError(f"{layers} {what} don't divide over {pp} stages")
    if layers // pp % vpp:
        raise SplitError(f"{layers // pp} {what} of a stage don't divide over its {vpp} chunks")
    return layers // pp // vpp
