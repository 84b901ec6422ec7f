"""Strategies: one column per degree of freedom, one row per candidate.

``tp sp pp vpp cp ep etp dp micro_batch zero recompute schedule`` are the words; dp = gpus / (tp * cp * pp), replicas
included. The attention grid is tp-cp-dp-pp, the expert grid etp-ep-edp-pp; they share only pp.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from mofa.schedules import SCHEDULE_NAMES, default_schedule
from mofa.specs.attention import MODULES_OF_ATTENTION
from mofa.specs.base import Spec
from mofa.specs.layouts.read import parse_layout_or_split
from mofa.specs.ranges import Degree, Sequences

RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", *MODULES_OF_ATTENTION, "mlp", "moe", "shared_experts")
CP_KINDS = ("ring", "allgather", "a2a")
"""How attention under context parallelism reaches all keys: they go around, are gathered, or heads are exchanged for
tokens by all-to-all (Megatron's ``cp_comm_type``: ``p2p``, ``all_gather``, ``a2a``)."""
BALANCING = ("none", "micro_moe")
MAX_TOKEN_CHUNKS = 64
MERGED_GROUPS = 2
"""Expert-parallel groups that balancing micro_moe merges: each expert then has so many replicas."""
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[SCHEDULE_NAMES]
RECOMPUTE_KINDS = ("none", "selective", "full", "ops", "every")
_RECOMPUTE = re.compile(
    r"none|ops|selective(:(?P<modules>[a-z_]+(\+[a-z_]+)*))?|full(:(?P<full>\d{1,4}))?|every:(?P<every>\d{1,4})"
)


class RecomputeSpec(Spec):
    """``none | selective[:module+module] | full[:n] | ops | every:n``; selective alone is core_attn."""

    kind: Literal["none", "selective", "full", "ops", "every"] = "none"
    modules: tuple[str, ...] = ()
    layers: int | None = None
    """full:n recomputes n layers of every stage's chunk; every:n each n-th layer."""
    token_chunks: Annotated[int, Field(ge=1, le=MAX_TOKEN_CHUNKS, strict=True)] = 1
    """Token chunks of the layers with experts, each recomputed besides (MemFine); no part of the text. [-]"""

    def of_layers(self, number: int) -> RecomputeSpec:
        """``full`` with the number of layers that a table of strategies has in its own column, -1 for all; else itself.

        >>> RecomputeSpec.parse("full").of_layers(3).text
        'full:3'
        """
        return self.model_copy(update={"layers": number}) if self.kind == "full" and number >= 0 else self

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, text: str) -> Self:
        """Read the text of a strategy, each once.

        >>> RecomputeSpec.parse("selective").modules
        ('core_attn',)
        """
        match = _RECOMPUTE.fullmatch(text.strip())
        if match is None:
            close = difflib.get_close_matches(text.split(":")[0][:40].casefold(), RECOMPUTE_KINDS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"recompute ({text[:40]!r}) must be none | selective[:module+module] | full[:n] | ops | every:n{hint}"
            )
        kind = text.split(":")[0]
        if kind == "selective":
            modules = tuple(sorted((match["modules"] or "core_attn").split("+")))
            for module in modules:
                if module not in RECOMPUTE_MODULES:
                    known = ", ".join(RECOMPUTE_MODULES)
                    raise ValueError(f"recompute module {module!r} is unknown; use one of {known}")
            return cls(kind="selective", modules=tuple(dict.fromkeys(modules)))
        number = match["full"] or match["every"]
        if number is not None and int(number) < 1:
            raise ValueError(f"recompute ({text!r}): n must be at least 1")
        return cls(kind=kind, layers=int(number) if number else None)

    @property
    def text(self) -> str:
        """What :meth:`parse` reads: all but the token chunks."""
        if self.kind == "selective":
            return "selective" if self.modules == ("core_attn",) else "selective:" + "+".join(self.modules)
        return self.kind if self.layers is None else f"{self.kind}:{self.layers}"

    def __str__(self) -> str:
        return self.text if self.token_chunks == 1 else f"{self.text} token_chunks={self.token_chunks}"


DispatcherName = Literal["alltoall", "allgather", "deepep"]


class FrameworkOptions(NamedTuple):
    """Options of a run that a strategy chooses; None: as the framework's profile or the user has it."""

    tp_overlap: bool | None = None
    dispatcher: DispatcherName | None = None
    dp_replicate: int | None = None
    overlap_param_gather: bool | None = None

    @property
    def chosen_options(self) -> dict[str, bool | str | int]:
        """Those that are chosen, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


AS_GIVEN = FrameworkOptions()


class StrategySpec(Spec):
    """One strategy, complete: how a job is laid out on its GPUs.

    Attributes
    ----------
    tp
        Tensor-parallel ranks. [-]
    sp
        Whether norms and dropout are split over the sequence of the tensor-parallel ranks.
    pp
        Pipeline stages. [-]
    vpp
        Virtual stages (chunks of layers) of each pipeline stage. [-]
    cp
        Context-parallel ranks. [-]
    cp_kind
        How attention reaches all keys under context parallelism: ``ring``, ``allgather`` or ``a2a``.
    ep
        Expert-parallel ranks. [-]
    etp
        Tensor-parallel ranks of the experts. [-]
    dp
        Data-parallel ranks, replicas of a shard group included. [-]
    micro_batch
        Sequences of one micro-batch. [sequences]
    zero
        ZeRO stage, 0 to 3: optimizer states are sharded from 1 on, gradients from 2, parameters with 3. [-]
    recompute
        Activation recomputation: ``none``, ``selective[:module+module]``, ``full[:n]``, ``ops`` or ``every:n``.
    schedule
        Pipeline schedule: ``1f1b``, ``interleaved``, ``gpipe``, ``zbv`` or ``interleaved-zb``.
    balancing
        ``none`` or ``micro_moe``.
    token_chunks
        Chunks in which tokens pass the experts. [-]
    layout
        What each virtual chunk holds: Megatron's string, options of an uneven split or torchtitan's lists of module
        names (:mod:`mofa.specs.layouts`); empty for the framework's own split.
    tp_overlap
        Whether linears communicate beside their products; None where it is as the framework has it, as are the next.
    dispatcher
        How tokens are sent to experts: ``alltoall``, ``allgather`` or ``deepep``.
    dp_replicate
        Replicas of a shard group (HSDP), 1 for FSDP over all ranks. [-]
    overlap_param_gather
        Whether Megatron gathers parameters beside the forward of a step, or all at once behind the optimizer.
    framework
        Name of the framework that runs it.

    Raises
    ------
    pydantic.ValidationError
        If a field is unknown, out of bounds or of the wrong type; it is a ``ValueError``.

    Notes
    -----
    The job has tp * cp * pp * dp GPUs. Experts divide the same GPUs anew: tp * cp * dp = etp * ep * edp, where edp is
    the data parallelism of an expert.

    Examples
    --------
    >>> strategy = StrategySpec(tp=8, sp=True, pp=4, dp=2)
    >>> strategy.tp * strategy.cp * strategy.pp * strategy.dp
    64
    """

    tp: Degree = 1
    sp: Annotated[bool, Field(strict=True)] = False
    pp: Degree = 1
    vpp: Degree = 1
    cp: Degree = 1
    cp_kind: Literal["ring", "allgather", "a2a"] = "ring"
    ep: Degree = 1
    etp: Degree = 1
    dp: Degree = 1
    micro_batch: Sequences = 1
    zero: Annotated[int, Field(ge=0, le=3, strict=True)] = 1
    recompute: str = "none"
    schedule: ScheduleName = default_schedule(1)
    balancing: Literal["none", "micro_moe"] = "none"
    """``micro_moe``: two expert-parallel groups merge, and every micro-batch's tokens are scheduled over replicas."""
    token_chunks: Annotated[int, Field(ge=1, le=MAX_TOKEN_CHUNKS, strict=True)] = 1
    """Chunks in which tokens go through the experts, each recomputed in the backward pass (MemFine)."""
    layout: str = ""
    """What each virtual chunk holds, such as ``Et*3|(tt|)*29m|L``; empty for the framework's own split."""
    tp_overlap: Annotated[bool | None, Field(strict=True)] = None
    """Whether linears communicate beside their products; None as the framework has it."""
    dispatcher: DispatcherName | None = None
    """How tokens are sent to experts; None as the framework has it."""
    dp_replicate: Degree | None = None
    """Replicas of a shard group (HSDP), 1 for FSDP over all ranks; None as the framework has it. [-]"""
    overlap_param_gather: Annotated[bool | None, Field(strict=True)] = None
    """Whether Megatron gathers parameters beside the forward of a step; None as the framework has it."""
    framework: str = "megatron"

    @property
    def options(self) -> FrameworkOptions:
        """The framework's options that it chooses."""
        return FrameworkOptions(self.tp_overlap, self.dispatcher, self.dp_replicate, self.overlap_param_gather)

    @field_validator("layout", mode="before")
    @classmethod
    def _list_as_text(cls, layout: object) -> object:
        return json.dumps(layout) if isinstance(layout, (list, tuple)) else layout

    @model_validator(mode="after")
    def _check(self) -> Self:
        RecomputeSpec.parse(self.recompute)
        if self.layout:
            try:
                parse_layout_or_split(self.layout)
            except ValueError as error:
                raise ValueError(f"layout ({self.layout[:60]!r}): {error}") from None
        return self


IntN = NDArray[np.int64]
BoolN = NDArray[np.bool_]
FloatN = NDArray[np.float64]


@dataclass(frozen=True)
class StrategyTable:
    """Candidates as columns; every array has shape (n,).

    ``recompute`` indexes ``recompute_modes``; ``recompute_layers`` is the number of layers per stage that
    mode ``full`` recomputes, -1 for all. ``cp_kind`` indexes ``CP_KINDS``, ``balancing``
    ``BALANCING``, ``layout`` the table's ``layouts``, ``options`` its ``option_sets``.
    """

    tp: IntN
    sp: BoolN
    pp: IntN
    vpp: IntN
    cp: IntN
    cp_kind: IntN
    ep: IntN
    etp: IntN
    dp: IntN
    micro_batch: IntN
    zero: IntN
    recompute: IntN
    recompute_layers: IntN
    schedule: IntN
    balancing: IntN
    layout: IntN
    options: IntN
    recompute_modes: tuple[RecomputeSpec, ...]
    layouts: tuple[str, ...] = ("",)
    """Texts of layouts; an empty one is the framework's own."""
    option_sets: tuple[FrameworkOptions, ...] = (AS_GIVEN,)
    """Options of the framework that rows choose."""

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def token_chunks(self) -> IntN:
        """Token chunks of the layers with experts. (n,)"""
        return np.array([mode.token_chunks for mode in self.recompute_modes])[self.recompute]

    def select_rows(self, rows: NDArray[np.intp] | BoolN | slice) -> StrategyTable:
        """The table of these rows."""
        columns = {c: getattr(self, c)[rows] for c in COLUMNS}
        return StrategyTable(
            **columns, recompute_modes=self.recompute_modes, layouts=self.layouts, option_sets=self.option_sets
        )

    @classmethod
    def concatenated(cls, tables: Sequence[StrategyTable]) -> StrategyTable:
        """Tables of the same modes of recomputation, layouts and sets of options, at least one, as one."""
        columns, first = {c: np.concatenate([getattr(table, c) for table in tables]) for c in COLUMNS}, tables[0]
        return cls(
            **columns, recompute_modes=first.recompute_modes, layouts=first.layouts, option_sets=first.option_sets
        )

    def rows_by_options(
        self, rows: NDArray[np.intp] | None = None
    ) -> list[tuple[FrameworkOptions, NDArray[np.intp]]]:  # fmt: skip
        """The sets of options that rows choose, each with its rows in order: as places in ``rows``, if given."""
        options = self.options if rows is None else self.options[rows]
        if len(self.option_sets) == 1:
            return [(self.option_sets[0], np.arange(len(options)))]
        numbers = np.flatnonzero(np.bincount(options)).tolist()
        return [(self.option_sets[number], np.flatnonzero(options == number)) for number in numbers]

    @property
    def common_options(self) -> FrameworkOptions:
        """The set of options that all rows choose; tables of several sets are cut by :meth:`rows_by_options` first."""
        first = int(self.options[0]) if len(self.options) else 0
        assert len(self.option_sets) == 1 or np.all(self.options == first), "rows choose several sets of options"
        return self.option_sets[first]

    def layout_text_of_row(self, i: int) -> str:
        """The text of one row's layout; empty where it is the framework's own."""
        return self.layouts[int(self.layout[i])]

    def row(self, i: int, framework: str) -> StrategySpec:
        """One row as a strategy."""
        mode = self.recompute_modes[int(self.recompute[i])]
        mode = mode.of_layers(int(self.recompute_layers[i]))
        return StrategySpec(
            tp=int(self.tp[i]), sp=bool(self.sp[i]), pp=int(self.pp[i]), vpp=int(self.vpp[i]), cp=int(self.cp[i]),
            cp_kind=CP_KINDS[int(self.cp_kind[i])], ep=int(self.ep[i]), etp=int(self.etp[i]),
            dp=int(self.dp[i]), micro_batch=int(self.micro_batch[i]), zero=int(self.zero[i]), recompute=mode.text,
            schedule=SCHEDULE_NAMES[int(self.schedule[i])], balancing=BALANCING[int(self.balancing[i])],
            token_chunks=mode.token_chunks, layout=self.layout_text_of_row(i), framework=framework,
            **self.option_sets[int(self.options[i])].chosen_options,
        )  # fmt: skip


COLUMNS = (
    "tp", "sp", "pp", "vpp", "cp", "cp_kind", "ep", "etp", "dp", "micro_batch", "zero", "recompute",
    "recompute_layers", "schedule", "balancing", "layout", "options",
)  # fmt: skip
