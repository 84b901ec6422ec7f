"""Bytes that a pipeline rank holds in backwards by weights, where PyTorch's schedules put weights' gradients off.

A chunk's layers have their turns from the first to the last (torch.distributed.pipelining, ``stage_backward_weight``).
Each lets go what it saved and makes its gradients, which are there for good from a step's first such backward on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mofa.cost.memory.in_flight import InFlightPeak, PipelinePeakMoments

ArrayN = NDArray[np.float64]


class WeightBackwardPeak(NamedTuple):
    """A moment inside of a layer whose weights' gradients are put off.

    Whether it is the last or the first of its kind, what it has alive, by mode, combination and kind, and by kind of
    tensor too [B], which stages have such a layer (n, R), and what is alive beside.
    """

    place: str
    live_bytes: tuple[ArrayN, ArrayN]
    where: NDArray[np.bool_]
    beside: InFlightPeak


class LayerGradients(NamedTuple):
    """Shares of a stage's gradients: of a layer, of what is behind the last one of its kind in each chunk, the head
    with it, and of the layers ahead of the first. (n, R, vpp) each [-]"""

    own: ArrayN
    behind_last: ArrayN
    ahead_of_first: ArrayN


class WeightBackwards:
    """Moments at which a rank may hold most in backwards by weights, of candidates of one pp x vpp."""

    def __init__(self, in_flight: PipelinePeakMoments) -> None:
        self.in_flight, self.rows = in_flight, in_flight.rows
        self.any = bool(np.any(in_flight.split))
        if not self.any:
            return
        lay = self.rows.stage_layers
        counts = lay.stages.layer_counts[:, lay.shown.shown_stages]
        recomputed = lay.fully_recomputed_by_chunk[lay.recompute_choice]
        self.layers = np.stack([counts - recomputed, recomputed], axis=2)
        """Layers of each kind, recomputed whole or not. (n, kinds, 2, R, vpp)"""

    def peaks_in_layers(
        self, kind: int, recomputed: int, there: NDArray[np.bool_], gradients: LayerGradients
    ) -> Iterator[WeightBackwardPeak]:
        """Moments inside of a kind of layer, recomputed whole or not, whose weights' gradients are put off.

        What layers ahead of it leave stays, such as all that was made again there. Most is there in a chunk's last
        layer where gradients come with each, and in its first where they are there from earlier micro-batches.

        Parameters
        ----------
        there
            Which chunks have such a layer. (n, R, vpp)

        Yields
        ------
        WeightBackwardPeak
            Where the last one and the first one have most alive, and the end of the last one, where a step's first has
            made its gradients. Nothing where no chunk puts them off.
        """
        there = there & self.in_flight.split
        if not np.any(there):
            return
        stacked, rows = self.in_flight.split_backward_bytes_by_layer_kind, self.rows
        peak, of_last, kinds, ended, end_of_last, between = (stacked(pick) for pick in (
            lambda costs: costs.peak_by_weights, lambda costs: costs.peak_by_weights_of_last,
            lambda costs: costs.peak_by_weights_kinds.T,
            lambda costs: costs.end_by_weights_kinds.T, lambda costs: costs.end_by_weights_of_last,
            lambda costs: costs.between_halves,
        ))  # fmt: skip
        layer, less_in_last, less_at_end = (
            rows.in_base_and_full_mode(grid)[recomputed][:, kind, None, None]
            for grid in (between, peak - of_last, ended.sum(axis=3) - end_of_last)
        )
        layer = layer + self.in_flight.saved[recomputed][:, kind, None, None]
        before_last = self.layers - self.in_flight.layers_behind[:, :, :, kind, recomputed]
        before_last[:, kind, recomputed] -= 1
        last, is_end = (
            layer - self._more_left(before_last),
            self.in_flight.is_last_of_chunk_without_head(kind, recomputed),
        )
        first = layer - self._more_left(self.in_flight.layers_ahead[:, :, :, kind, recomputed])
        later = self.in_flight.grads_share - gradients.ahead_of_first
        not_last = there & ~(is_end & (self.layers[:, kind, recomputed] == 1))
        for place, live_bytes, where, gone, own_grads, later_grads in (
            ("last", (peak, kinds), there, last + is_end * less_in_last, gradients.own, gradients.behind_last),
            ("last", (ended.sum(axis=3), ended), there, last + is_end * less_at_end, 0.0, gradients.behind_last),
            ("first", (peak, kinds), not_last, first, 0.0, later),
        ):  # fmt: skip
            if np.any(where):
                beside = self.in_flight.in_flight_peak(
                    "W", np.where(where, gone, np.inf), own_grads=own_grads, behind_grads=-later_grads
                )
                yield WeightBackwardPeak(place, live_bytes, np.asarray(where.any(axis=2)), beside)

    def _more_left(self, layers: ArrayN) -> ArrayN:
        """What so many layers, (n, kinds, 2, R, vpp), leave of their backwards by weights more than they held before.
        (n, R, vpp) [B]"""
        left, between = (self.in_flight.split_backward_bytes_by_layer_kind(pick) for pick in (
            lambda costs: costs.left_until_chunk_end, lambda costs: costs.between_halves,
        ))  # fmt: skip
        modes = zip(*map(self.rows.in_base_and_full_mode, (left, between)), self.in_flight.saved, strict=True)
        more = np.stack([a - b - c for a, b, c in modes], axis=2)
        return np.asarray(np.einsum("nkorc,nko->nrc", np.maximum(layers, 0.0), more))
