"""What replicas of hybrid sharding cost: sharded gradients are summed over them piece by piece.

A piece is what is gathered and reduced together: a layer, or an end of the model. The device waits for all sums at the
end of a backward (PyTorch 2.11, ``fsdp/_fully_shard/_fsdp_param_group.py``, ``finalize_backward``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import max_of_array_rows
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.computing_slowdown import collective_slowdown
from mofa.cost.rows import GatheredRows, chunk_layer_params
from mofa.specs.params import layer_params

ArrayN = NDArray[np.float64]


def replica_all_reduce_s(rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
    """All-reduces of each stage's sharded gradients over replicas, and that of the last piece. (n, R) each [s]

    The embedding's is the last on the stage that has it, a layer's elsewhere.
    """
    grids, lay = rows.grids, rows.stage_layers
    if rows.framework.dp_replicate <= 1:
        nothing = np.zeros((len(rows.table), len(lay.shown.shown_stages)))
        return nothing, nothing
    model = rows.workload.model
    counts = lay.stages.layer_counts[:, lay.shown.shown_stages].sum(axis=2)
    dense, expert = np.maximum(rows.params - chunk_layer_params(rows.workload, grids, lay), 0.0).sum(axis=3)
    embedding = np.minimum((model.vocab * model.hidden / grids.tp)[:, None] * rows.is_embedding_stage, dense)
    pieces = [
        (embedding, np.zeros_like(expert), rows.is_embedding_stage),
        (dense - embedding, expert, np.ones(counts.shape[1])),
    ]
    for of_stages, kind in zip(counts, lay.stages.kinds, strict=True):
        p = layer_params(model, kind.moe)
        of_dense = (p.matrices_tp + p.shared) / grids.tp + p.replicated
        of_expert = np.broadcast_to(p.routed / (grids.ep * grids.etp), of_dense.shape)
        pieces.append((of_dense[:, None], of_expert[:, None], of_stages))
    group, fabric = rows.groups["dp_replicate"].with_indexed_arrays(np.s_[:, None]), rows.costs.machine.network_fabric
    width, ranks = rows.framework.reduced_bytes_per_param, (rows.shards.dense_ranks, rows.shards.expert_ranks)
    each_s = [
        collective_s("all_reduce", width * (of_dense / ranks[0] + of_expert / ranks[1]), group, fabric)
        for of_dense, of_expert, _ in pieces
    ]
    total = sum(seconds * times for seconds, (_, _, times) in zip(each_s, pieces, strict=True))
    layer_s = np.max(
        [seconds * (times > 0) for seconds, (*_, times) in zip(each_s[2:], pieces[2:], strict=True)], axis=0
    )
    last = np.where(rows.is_embedding_stage > 0, each_s[0], layer_s)
    return np.asarray(total)[rows.grid_index], last[rows.grid_index]


def exposed_and_hidden_replica_all_reduces_s(rows: GatheredRows, backward_s: ArrayN) -> tuple[ArrayN, ArrayN]:
    """What replicas leave exposed of a backward on a single stage, and what is hidden. (n,) each [s]

    A piece's sum follows its reduction. Beside it computing loses in the share of the backward that the device is busy:
    with copies of gradients and weights, what these and computing lose beside other communication, and what they lose
    beside the sums. Of sums of T seconds beside a backward of B, of which b are busy, that is L in
    ``L = slow T (b + L) / (B + L)``. Where a communicator sets the time of layers, computing has that much slack.
    """
    total, last = (seconds[:, 0] for seconds in replica_all_reduce_s(rows))
    curves, layers, machine = rows.cluster.gpu.curves, rows.layers, rows.costs.machine
    slow = collective_slowdown(curves, rows.groups["dp_replicate"], machine.network_fabric)[rows.grid_index]
    of_layers = collective_slowdown(curves, machine.groups["fsdp"], machine.network_fabric)
    busy = max_of_array_rows(
        rows.sum_layers_by_stage(layers.backward_busy_s + of_layers[:, None] * layers.backward_hidden_s)
    )
    beside_s = np.minimum(total - last, backward_s[:, 0])
    busy, beyond_s = np.minimum(busy, backward_s[:, 0]), backward_s[:, 0] - slow * beside_s
    slack_s = max_of_array_rows(
        rows.sum_layers_by_stage(layers.stack_of_blocks(lambda c: c.backward.waits_s(of_layers)))
    )
    lost_s = (np.sqrt(beyond_s**2 + 4.0 * slow * beside_s * busy) - beyond_s) / 2.0
    lost_s = np.maximum(lost_s - slack_s, 0.0)
    left_s = np.maximum(total - backward_s[:, 0] - lost_s, last)
    return left_s + lost_s, total - left_s
