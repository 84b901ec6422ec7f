"""Times of a host's modules, each over a small layer of Transformer Engine that was timed right before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from mofa.calibrate.cases import Sample, Shape
from mofa.calibrate.measurements import Row

FAMILY = "te_host"
BF16 = "bf16"
DENSE = "model_dense"
ATTENTION, QUERIES = "TEDotProductAttention.forward", "SelfAttention.get_query_key_value_tensors"
DENSE_CALLS = {
    QUERIES: 1, "TELayerNormColumnParallelLinear.forward": 1, "TELinear.forward": 2,
    "fused_apply_rotary_pos_emb": 2, ATTENTION: 1, "bias_swiglu_impl": 1, "bias_dropout_add_fused_train": 2,
}  # fmt: skip
"""What a dense layer calls, without what these call."""
PACES = ("small_op", "layer_fwd", "layer_bwd")
"""Variants of rows that say how fast the host was."""
WAYS_BACK = ("bwd", "backward")
"""Variants of rows that autograd's thread issued."""


@dataclass(frozen=True)
class HostTimesOverSmallLayer:
    """Rows by what they timed, each over the layer beside it. [-]"""

    times_by_case: dict[tuple[str, str, str], list[tuple[Shape, float]]]
    """By medians of both: low quantiles of a ratio are moments at which the layer happened to be slow."""

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> HostTimesOverSmallLayer:
        """Of rows of any number of folders; other families are left out."""
        rows = [row for row in rows if row.case.family == FAMILY]
        paces: dict[tuple[str, str, str, str, str], Sample] = {}
        for row in rows:
            if row.case.variant in PACES:
                paces[row.host, row.case.op, row.case.dtype, linear_shape_text(row.case.shape), row.case.variant] = (
                    row.sample
                )
        by: dict[tuple[str, str, str], list[tuple[Shape, float]]] = defaultdict(list)
        for row in rows:
            pace = "layer_bwd" if row.case.variant in WAYS_BACK else "layer_fwd"
            beside = paces.get((row.host, row.case.op, row.case.dtype, linear_shape_text(row.case.shape), pace))
            if row.case.variant not in PACES and beside is not None:
                key = row.case.op, row.case.variant, row.case.dtype
                by[key].append((row.case.shape, row.sample.median_s / beside.median_s))
        return cls(dict(by))

    def median_time_of_op(self, op: str, variant: str, dtype: str = BF16, **sizes: int) -> float | None:
        """The median of what was timed of an op, of shapes with these sizes."""
        some = self.times_by_case.get((op, variant, dtype), [])
        values = [value for shape, value in some if all(shape.get(k) == v for k, v in sizes.items())]
        return median(values) if values else None

    def method_call_time(self, model: str, method: str, dtype: str = BF16) -> float | None:
        """A method's call in a model, without what the clocks around calls take."""
        called = self.median_time_of_op(model, f"call:{method}", dtype, micro_batches=1)
        return None if called is None else called * self.timer_correction

    @cached_property
    def timer_correction(self) -> float:
        """A dense layer's forward time over the sum of its separately timed calls, at most 1. [-]

        It takes the timers' own time off calls. 1 where not all calls were timed.
        """
        layer = self.time_per_layer_with_dense_ends(DENSE, "forward")
        calls = [
            (self.median_time_of_op(DENSE, f"call:{method}", micro_batches=1), times)
            for method, times in DENSE_CALLS.items()
        ]
        if layer is None or any(call is None for call, _ in calls):
            return 1.0
        return min(layer / sum(call * times for call, times in calls if call is not None), 1.0)

    def time_per_added_layer(self, model: str, part: str, dtype: str = BF16) -> float | None:
        """What a layer more of a model adds to a part of its step."""
        line = self._by_layers(model, part, dtype)
        return None if line is None else line[1]

    def time_beside_layers(self, model: str, part: str) -> float | None:
        """What a part of a model's step takes beside its layers."""
        line = self._by_layers(model, part, BF16)
        return None if line is None else line[0]

    def time_per_layer_with_dense_ends(self, model: str, part: str) -> float | None:
        """What a layer of a model takes of a part whose ends take what a dense model's do: the middle of its sizes.

        The difference of two sizes, two layers apart, is as uncertain as a whole layer where the host's pace changes.
        """
        ends, timed = self.time_beside_layers(DENSE, part), self.times_by_case.get((model, part, BF16), [])
        each = [(value - (ends or 0.0)) / int(shape["layers"]) for shape, value in timed if shape["micro_batches"] == 1]
        return None if ends is None or not each else median(each)

    def _by_layers(self, model: str, part: str, dtype: str) -> tuple[float, float] | None:
        by: dict[int, list[float]] = defaultdict(list)
        for shape, value in self.times_by_case.get((model, part, dtype), []):
            if shape["micro_batches"] == 1:
                by[int(shape["layers"])].append(value)
        if len(by) < 2:
            return None
        few, many = min(by), max(by)
        each = (median(by[many]) - median(by[few])) / (many - few)
        return median(by[few]) - few * each, each


def linear_shape_text(shape: Shape) -> str:
    """The shape of a linear as one word, without what rows of parts have more."""
    return " ".join(f"{name}={value}" for name, value in shape.items() if name != "calls")
