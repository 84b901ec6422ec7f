"""In which order layers of different kinds, recomputed whole or not, lie in a rank's chunks."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


def layers_behind_last_by_mode(rows: GatheredRows) -> ArrayN:
    """Layers of each kind (second axis), recomputed whole or not (third), behind the last of each kind (fourth) that is
    recomputed or not (fifth), in each chunk. (choices, kinds, 2, kinds, 2, R, vpp)"""
    return _layers_beyond_by_mode(rows, ahead=False)


def layers_ahead_of_first_by_mode(rows: GatheredRows) -> ArrayN:
    """Layers of each kind ahead of the first of each kind, as :func:`layers_behind_last_by_mode` has those behind the
    last. (choices, kinds, 2, kinds, 2, R, vpp)"""
    return _layers_beyond_by_mode(rows, ahead=True)


def sum_over_modes(layers: ArrayN, plain: ArrayN, full: ArrayN) -> ArrayN:
    """The sum over so many layers, (n, kinds, 2, R, vpp), of something of each, plain or recomputed whole, (n, kinds).
    (n, R, vpp)"""
    return np.asarray(np.einsum("nkorc,nko->nrc", layers, np.stack([plain, full], axis=2)))


def _layers_beyond_by_mode(rows: GatheredRows, *, ahead: bool) -> ArrayN:
    lay, table = rows.stage_layers, rows.table
    stages, shown = lay.stages, lay.shown.shown_stages
    _, given = np.unique(lay.recompute_choice, return_index=True)
    kinds = len(stages.kinds)
    out = np.zeros((len(lay.fully_recomputed_by_chunk), kinds, 2, kinds, 2, len(shown), stages.vpp))
    for first in given.tolist():
        spec, layers = table.recompute_modes[int(table.recompute[first])], int(table.recompute_layers[first])
        recomputed = stages.recomputed_layers(spec, layers)
        for r, stage in enumerate(shown.tolist()):
            for c, chunk in enumerate(stages.layers[stage]):
                modes = zip(chunk, map(int, recomputed[stage][c]), strict=True)
                beyond: dict[tuple[int, int], int] = {}
                seen = set[tuple[int, int]]()
                runs = [(mode, len(list(run))) for mode, run in groupby(modes)]
                for mode, run in runs if ahead else reversed(runs):
                    if mode not in seen:
                        seen.add(mode)
                        for other, number in beyond.items():
                            out[(int(lay.recompute_choice[first]), *other, *mode, r, c)] = number
                    beyond[mode] = beyond.get(mode, 0) + run
    return out
