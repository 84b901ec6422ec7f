"""What parts of Megatron's layers take the host in real steps, as ``scripts/layer_segments.py`` times them."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mofa.calibrate.fits.te_host_facts import line_of_least_relative_errors

GROUPED = "grouped"
"""The part that is one grouped linear, forward."""
PROJECTIONS, ROPES = "get_query_key_value_tensors", ("fused_apply_mla_rope_for_q", "fused_apply_mla_rope_for_kv")
"""What makes latent attention's queries, keys and values, and the functions in it that rotate them."""
ROPES_BACK = ("bk.ApplyMLARotaryEmbQ", "bk.ApplyMLARotaryEmbKV")
"""Their ways back."""


@dataclass(frozen=True)
class LayerSegment:
    """A part of a run's layers in steps of one kind of pass."""

    run: str
    format: str
    """What its products compute in."""
    experts: int
    recompute: str
    """What its strategy computes again."""
    host_issue_s: float
    """A small op between its steps. [s]"""
    part: str
    """``layer``, ``attention``, ``moe``, ``experts`` or ``grouped`` forward, ``back`` or ``grouped_back``."""
    is_recorded: bool
    """Whether autograd records it."""
    in_first_micro_batch: bool
    """Whether it lies in a step's first micro-batch, in which fp8 weights are cast."""
    calls: float
    """A step. [-]"""
    seconds: float
    """A step's, less what the host waited for the device. [s]"""

    @property
    def seconds_per_call(self) -> float:
        """Of one call. [s]"""
        return self.seconds / self.calls


def read_layer_segments(path: Path) -> list[LayerSegment]:
    """Segments of a table, in its order."""
    with path.open(newline="") as file:
        return [
            LayerSegment(
                row["run"],
                row["format"],
                int(row["experts"]),
                row["recompute"],
                float(row["host_issue_s"]),
                row["part"],
                row["autograd"] == "records",
                row["micro_batch"] == "first",
                float(row["calls"]),
                float(row["seconds"]) - float(row["waited_s"]),
            )
            for row in csv.DictReader(file)
        ]


def unrecorded_over_recorded_time_by_format(segments: Iterable[LayerSegment]) -> dict[str, float]:
    """What each expert of a grouped linear takes forward without autograd's record, over the same with it. [-]

    By what it computes in, of lines over the number of experts of checkpointed runs: in their first passes, where no
    weight is cast, and in the repetitions. Of these the faster micro-batches count, as a full collection of Python's
    garbage falls into some of them.

    Examples
    --------
    >>> def timed(experts, records, first, seconds):
    ...     return LayerSegment("a", "bf16", experts, "full", 1e-6, "grouped", records, first, 10.0, seconds)
    >>> runs = [(8, 16.0), (16, 24.0)]
    >>> again = [timed(n, True, first, 1e-5 * ops) for n, ops in runs for first in (True, False)]
    >>> once = [timed(n, False, False, 1e-5 * (ops - n / 2)) for n, ops in runs]
    >>> {name: round(share, 3) for name, share in unrecorded_over_recorded_time_by_format([*once, *again]).items()}
    {'bf16': 0.5}
    """
    by_run: dict[tuple[str, int, str], dict[tuple[bool, bool], float]] = defaultdict(dict)
    for segment in segments:
        if segment.part == GROUPED and segment.recompute == "full":
            ops = segment.seconds_per_call / segment.host_issue_s
            by_run[segment.format, segment.experts, segment.run][segment.is_recorded, segment.in_first_micro_batch] = (
                ops
            )
    passes: dict[str, tuple[dict[int, list[float]], dict[int, list[float]]]] = {}
    for (format_, experts, _), ops_of in by_run.items():
        if {(True, True), (True, False), (False, False)} <= ops_of.keys():
            recorded, unrecorded = passes.setdefault(format_, (defaultdict(list), defaultdict(list)))
            recorded[experts].append(min(ops_of[True, True], ops_of[True, False]))
            unrecorded[experts].append(ops_of[False, False])
    shares = {}
    for format_, both in passes.items():
        lines = [line_of_least_relative_errors({n: median(ops) for n, ops in some.items()}) for some in both]
        if lines[0] is not None and lines[1] is not None:
            shares[format_] = lines[1][1] / lines[0][1]
    return shares


@dataclass(frozen=True)
class LatentAttentionSmallOps:
    """What latent attention takes the host beside its linears and its core, in small ops beside it. [-]"""

    rope: float
    """The rotation of queries or of keys, forward."""
    rope_back: float
    """Of one rotation's backward. [small ops]"""
    own: float
    """The Python around them, forward."""


def latent_attention_time_in_small_ops(segments: Iterable[LayerSegment]) -> LatentAttentionSmallOps | None:
    """Host times of latent attention's parts over that of one small op: of a dense model with one projection of
    queries, whose linears take what they do in the mean of its layers.

    Two of four linears of a layer and one of its two linears with a norm make queries, keys and values; the other
    linears are the projection behind attention and the MLP's. None without such a run.

    Examples
    --------
    >>> def timed(part, ops):
    ...     return LayerSegment("mla-dense", "bf16", 0, "none", 1e-6, part, True, False, 2.0, 2e-6 * ops)
    >>> parts = {PROJECTIONS: 90.0, "linear": 15.0, "norm_linear": 20.0, **dict.fromkeys((*ROPES, *ROPES_BACK), 10.0)}
    >>> latent_attention_time_in_small_ops([timed(part, ops) for part, ops in parts.items()])
    LatentAttentionSmallOps(rope=10.0, rope_back=10.0, own=20.0)
    """
    later = [segment for segment in segments if segment.experts == 0 and not segment.in_first_micro_batch]
    runs = {segment.run for segment in later if segment.part in ROPES}
    ops = {segment.part: segment.seconds_per_call / segment.host_issue_s for segment in later if segment.run in runs}
    if not {PROJECTIONS, "linear", "norm_linear", *ROPES, *ROPES_BACK} <= ops.keys():
        return None
    turned, turned_back = (sum(ops[name] for name in names) for names in (ROPES, ROPES_BACK))
    own = ops[PROJECTIONS] - 2.0 * ops["linear"] - ops["norm_linear"] - turned
    return LatentAttentionSmallOps(turned / len(ROPES), turned_back / len(ROPES_BACK), max(own, 0.0))
