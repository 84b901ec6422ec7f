"""Parameters of products of one expert each, one kernel each on several streams."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from mofa.specs.fitted import PowerLimitedCurve
from mofa.specs.ranges import KernelSeconds, Rate, Sharpness, TileSlowdown


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class MultiStreamForm:
    """Parameters of :func:`mofa.cost.kernels.multi_stream.multi_stream_products_s`, beside those of single products."""

    floor_s: KernelSeconds
    """Events before the first product and behind the last, on all streams."""
    start_s: KernelSeconds
    """Between the starts of two products, whichever streams they are on."""
    slower: TileSlowdown
    """Time of a tile over that in single products. [-]"""
    bytes_per_s: Rate
    added_bytes_per_s: Rate
    """Rate of what adding a weight's gradient to the main one moves beyond writing it."""
    sharpness: Sharpness
    """Exponent that joins computing and moving."""


class MultiStreamCurve(PowerLimitedCurve):
    """Experts' products of one format as several streams run them."""

    form: MultiStreamForm
