"""Physical ranges of plain numbers in files and options: the one home of each.

Numbers with a unit and a provenance are the facts of :mod:`mofa.specs.base`, whose bounds are from here too. A range is
wide: it refuses what no machine, model or job can be, and keeps what follows from it within the numbers of a computer.
Where a count is looped or allocated over, its bound says what that costs.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mofa.errors import SpecError

# --- facts with a unit
LEAST_SECONDS, MOST_SECONDS = 1e-15, 1e12
"""From what light needs for a third of a micrometre to thirty thousand years. [s]"""
MOST_BYTES = 1e21
"""A zettabyte. [B]"""
LEAST_RATE, MOST_RATE = 1.0, 1e33
"""Of bytes or operations in a second: from one, to one that takes no time. [1/s]"""
MOST_WATTS = 1e12
LEAST_SHARE = 1e-6
"""Of a rate; a kernel a million times slower than its peak is none. [-]"""
LEAST_FACTOR, MOST_FACTOR = 1e-9, 1e9
LEAST_RATIO, MOST_RATIO = 1e-3, 1e3
"""Of two times or rates of one kind. [-]"""
LEAST_CLOCK, MOST_CLOCK = 0.1, 4.0
"""Over the full clock; above 1 is what power would allow. [-]"""
MOST_IN_SWITCH = 2.0
"""Speed-up of an all-reduce whose sums a switch makes: each GPU then sends its part once and not twice. [-]"""
MOST_SLOWDOWN = 100.0
"""How much longer a node that still runs takes for its kernels. [-]"""
MOST_PUE = 10.0
"""Power of a building over that of its machines. [-]"""
MOST_TOKENS = 1e24
MOST_USD = 1e6
"""Of a GPU-hour. [USD]"""
LEAST_LOG_DAYS, MOST_LOG_DAYS = 1e-3, 1e6
"""How long nodes were watched: from a minute and a half to three thousand years. [d]"""

# --- fitted forms of kernels
KernelSeconds = Annotated[float, Field(ge=0.0, le=1e6)]
"""A start, a floor, or what a row, a column or an expert costs. [s]"""
LengthSeconds = Annotated[float, Field(ge=1e-6, le=1.0)]
"""A kernel's length that others are compared with. [s]"""
UnitSeconds = Annotated[float, Field(ge=1e-15, le=1e6)]
"""What a unit of work takes: no less than light needs for a third of a micrometre. [s]"""
Rate = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)]
"""[B/s] or [FLOP/s]"""
RateOrNone = Annotated[float, Field(ge=0.0, le=MOST_RATE)]
"""As :data:`Rate`; 0 where nothing moves so. [B/s]"""
TileSize = Annotated[int, Field(ge=1, le=65_536)]
"""Rows or columns that one multiprocessor computes. [-]"""
RowsOrNone = Annotated[int, Field(ge=0, le=10**9)]
ShareOrNone = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share of something, or nothing of it. [-]"""
Sharpness = Annotated[float, Field(ge=0.04, le=1024.0)]
"""Exponent that joins two times that overlap: 1 adds them, a large one takes the larger; a fit tries from 0.05. [-]"""
Elements = Annotated[float, Field(ge=0.0, le=1e9)]
"""A length that comes on top. [elements]"""
BytesPerElement = Annotated[float, Field(ge=1.0, le=1e4)]
"""What a kernel reads and writes for an element: an fp8 one once, at least. [B]"""
ExtraBytesPerElement = Annotated[float, Field(ge=0.0, le=1e3)]
"""What is moved for an element or a parameter on top; 0 where nothing is. [B]"""
BytesPerParam = Annotated[float, Field(ge=0.5, le=64.0)]
"""Held of a parameter, its gradient or its states: four bits at least. [B]"""
Slots = Annotated[int, Field(ge=1, le=10**7)]
"""Units of work at a time, on all multiprocessors. [-]"""
Splits = Annotated[int, Field(ge=1, le=4096)]
Multiple = Annotated[float, Field(ge=0.0, le=1e3)]
"""Of a time over another; 0 where it adds nothing. [-]"""
TileSlowdown = Annotated[float, Field(ge=0.1, le=100.0)]
"""Time of a tile on several streams over that of one that has the GPU to itself. [-]"""
PositiveMultiple = Annotated[float, Field(ge=1e-3, le=1e3)]
Size = Annotated[float, Field(ge=0.0, le=1e30)]
"""Of a kernel that was measured. [-]"""
RelativeError = Annotated[float, Field(ge=0.0, le=1e9)]
"""[-]"""

# --- what runs measured
MeasuredSeconds = Annotated[float, Field(ge=1e-9, le=1e6)]
"""From less than a processor's cycle to twelve days. [s]"""
MeasuredSecondsOrNone = Annotated[float, Field(ge=0.0, le=1e6)]
"""[s]"""
MeasuredBytes = Annotated[int, Field(ge=1, le=10**15)]
"""Of a device: a petabyte at most. [B]"""
MeasuredBytesOrNone = Annotated[int, Field(ge=0, le=10**15)]
"""[B]"""
MeasuredTokens = Annotated[int, Field(ge=0, le=10**12)]
"""That one expert got in a step. [tokens]"""
MeasuredCount = Annotated[int, Field(ge=0, le=10**9)]
"""Of ranks, retries, versions. [-]"""
GradientNorm = Annotated[float, Field(ge=0.0, le=1e30)]

# --- sizes of models and jobs
MAX_LOSS_METRICS = 64
"""Each is ops of its own behind the loss. [-]"""
MAX_DISPATCH_SYNCS = 64
"""Each is an op of its own in a layer with experts; Megatron has up to three. [-]"""
MAX_ALIGNMENT = 65_536
"""Rows that an expert's input may be padded by. [tokens]"""
MAX_WIDTH = 2**24
"""Of a hidden or intermediate width, a head, a rank: a thousand times what models have. [-]"""
MAX_GPUS = 2**20
"""Tables have a row for every way to cut the GPUs. [-]"""
MAX_LAYERS = 1024
"""Eight times those of the deepest models that are trained (Llama 3 405B: 126). A search plays up to 30 strategies, and
their steps grow with the layers. Readers of lists of layers go no further. [layers]"""
MAX_MTP_LAYERS = 64
"""Each is described, costed and played by itself on the last stage; DeepSeek-V3 has one. [layers]"""
MOST_LOAD_FACTOR = 1024.0
"""Of a load over the mean: rows that an expert has room for, or moves at. [-]"""
LoadFactor = Annotated[float, Field(gt=0, le=MOST_LOAD_FACTOR)]
"""[-]"""
LoadFactorAboveMean = Annotated[float, Field(ge=1, le=MOST_LOAD_FACTOR)]
"""[-]"""
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH, strict=True)]
WidthOrNone = Annotated[int, Field(ge=0, le=MAX_WIDTH, strict=True)]
"""0 for none. [-]"""
Vocabulary = Annotated[int, Field(ge=1, le=2**28, strict=True)]
"""[tokens]"""
NumHeads = Annotated[int, Field(ge=1, le=2**16, strict=True)]
Experts = Annotated[int, Field(ge=1, le=2**15, strict=True)]
"""Of a layer: a draw of routing holds so many numbers, a placement that times the ranks. [-]"""
ExpertsOrNone = Annotated[int, Field(ge=0, le=2**15, strict=True)]
Tokens = Annotated[int, Field(ge=1, le=2**31, strict=True)]
"""Of a sequence, or a window of it. [tokens]"""
Sequences = Annotated[int, Field(ge=1, le=2**31, strict=True)]
"""Of a step or a micro-batch. [sequences]"""
Degree = Annotated[int, Field(ge=1, le=MAX_GPUS, strict=True)]
"""Of parallelism. [ranks]"""
SpareNodes = Annotated[int, Field(ge=0, le=MAX_GPUS, strict=True)]
"""[nodes]"""
LayerPeriod = Annotated[int, Field(ge=1, le=MAX_LAYERS, strict=True)]
"""Every so many-th layer. [layers]"""
LayerPeriodOrNone = Annotated[int, Field(ge=0, le=MAX_LAYERS, strict=True)]
"""0 for none. [layers]"""
MAX_HOST_THREADS = 1024
"""Of a rank; more than any node has cores. [-]"""


def number_within(where: str, value: float, unit: str, least: float, most: float) -> float:
    """A number that an option gives, of a physical range.

    Raises
    ------
    SpecError
        If it is outside of the range, or no number.

    Examples
    --------
    >>> number_within("--price", 2.5, "USD", 0.0, MOST_USD)
    2.5
    """
    if not least <= value <= most:
        given, low, high = (f"{x:,}"[:40] if isinstance(x, int) else f"{x:g}" for x in (value, least, most))
        raise SpecError(f"{where}: is {given} {unit}; give {low} to {high} {unit}")
    return value
