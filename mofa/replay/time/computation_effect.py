"""What playing a computation does to a rank's clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StreamsAfterComputation(NamedTuple):
    """What a computation leaves on a clock's streams, relative to its end. [s]"""

    streams: tuple[tuple[str, float], ...]
    ready: tuple[tuple[str, float, int], ...]
    ops_in_flight: tuple[tuple[float, float, int, float, float], ...]
    idle_gaps: tuple[tuple[float, float], ...]

    def still_pending(self) -> StreamsAfterComputation:
        """The part of the effect yet to come: all that matters where nothing begins before now."""
        to_come = StreamsAfterComputation(
            tuple(item for item in self.streams if item[1] > 0), tuple(item for item in self.ready if item[1] > 0),
            tuple(item for item in self.ops_in_flight if item[1] > 0),
            tuple(item for item in self.idle_gaps if item[1] > 0),
        )  # fmt: skip
        return to_come if any(to_come) else NOTHING


NOTHING = StreamsAfterComputation((), (), (), ())


@dataclass(frozen=True)
class ComputationEffect:
    """What a computation did to a clock, relative to its beginning (``seconds``) and its end (the rest). [s]"""

    seconds: float
    host: float
    left: StreamsAfterComputation
    ahead: StreamsAfterComputation
    counts: NDArray[np.float64]
    """Exposed, beside, waited and late-issue seconds, by :data:`mofa.cost.block.tape_clock.EXPOSED`.
    (4, len(EXPOSED))"""
