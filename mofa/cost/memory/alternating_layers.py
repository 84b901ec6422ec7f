"""What layers keep around the last and the first of a kind, where plain layers and recomputed ones take turns.

Of ``every:n`` each nth layer is recomputed whole (torchtitan, ``distributed/activation_checkpoint.py``), so that which
layers are behind another one, and whether it is the model's last, follows from their order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.memory.chunk_layer_order import layers_behind_last_by_mode
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


class AlternatingLayers:
    """Corrections of a stage's moments for candidates whose layers take turns; others stay as they are.

    ``saved`` is what a layer keeps, plain and recomputed whole. (n, kinds) each [B]
    """

    def __init__(self, rows: GatheredRows, saved: tuple[ArrayN, ArrayN]) -> None:
        table = rows.table
        period = np.array([spec.layers or 1 if spec.kind == "every" else 0 for spec in table.recompute_modes])
        self.period = period[table.recompute][:, None]
        """Of how many layers one is recomputed; 0 for candidates whose layers take no turns. (n, 1) [-]"""
        self.any, self.saved = bool(self.period.any()), saved
        if self.any:
            layers = layers_behind_last_by_mode(rows)[rows.stage_layers.recompute_choice][..., -1]
            self.behind = layers  # (n, kinds, 2, kinds, 2, R)

    def freed_in_last_backward(self, gone: ArrayN, kind: int, label: str) -> ArrayN:
        """What is ``gone`` in the backward of the last layer of a kind, recomputed where there is a ``label``. (n, R)
        [B]"""
        if not self.any:
            return gone
        recomputed = int(bool(label))
        exact = np.einsum("nkor,onk->nr", self.behind[:, :, :, kind, recomputed], np.stack(self.saved))
        return np.where(self.period > 0, exact + self.saved[recomputed][:, kind, None], gone)

    def is_last_layer(self, alone: NDArray[np.bool_], kind: int, label: str) -> NDArray[np.bool_]:
        """Whether the last layer of a kind has none behind it; where layers take no turns, whether all of that kind are
        ``alone`` in their mode. (n, R)"""
        if not self.any:
            return alone
        behind = self.behind[:, :, :, kind, int(bool(label))].sum(axis=(1, 2))
        return np.where(self.period > 0, behind == 0.0, alone)

    def kept_bytes_between_last_two(self, kind: int, label: str) -> ArrayN | float:
        """What layers keep that are between the last two of a kind's recomputed ones, or plain ones. (n, 1) [B]"""
        if not self.any:
            return 0.0
        plain, full = (each[:, kind, None] for each in self.saved)
        between = (self.period - 1.0) * plain if label else (self.period == 2) * full
        return np.where(self.period > 0, between, 0.0)

    def at_first_layer(self, more: ArrayN | float, label: str) -> ArrayN | float:
        """What the model's first layer has ``more``, which is a plain one. (n, 1) [B]"""
        return np.where(self.period > 1, 0.0, more) if self.any and label else more
