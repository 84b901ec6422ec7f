"""What computing waits for activations that are still on their way to the host when their backward comes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


def wait_for_host_copies_s(rows: GatheredRows, forward_s: ArrayN, backward_s: ArrayN) -> ArrayN:
    """What a micro-batch's backward waits for copies of its forward that are not there yet. (n, R) [s]

    Copies to the host run one after the other beside computing. The first that comes back is the one that went last. On
    the last stage it is asked for behind the forward, the head and the last layer's backward, which keeps its own;
    elsewhere a micro-batch's copies have a forward and a backward of time. What copies back take longer than a layer's
    backward is in the layers' own times.

    Parameters
    ----------
    forward_s, backward_s
        Of all chunks of each stage. (n, R) [s]
    """
    costs = rows.costs
    to_host_s = rows.layers.copies_to_host_s
    all_s = rows.sum_layers_by_stage(to_host_s)
    of_last_layer = rows.base_mode_index, rows.k, rows.last_layer_kind
    head_s = costs.head.backward.total_s[rows.k] + rows.layers.backward_s[of_last_layer]
    before_s = forward_s + np.where(rows.is_last_stage > 0, head_s[:, None], backward_s)
    return np.asarray(np.maximum(all_s - to_host_s[of_last_layer][:, None] * rows.is_last_stage - before_s, 0.0))
