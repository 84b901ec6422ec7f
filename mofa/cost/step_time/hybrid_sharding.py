"""What replicas of hybrid sharding cost: sharded gradients are summed over them piece by piece.

A piece is what is gathered and reduced together: a layer, or an end of the model. The device waits for all sums at the
end of a backward (PyTorch 2.11, ``fsdp/_fully_shard/_fsdp_param_group.py``, ``finalize_backward``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.build import layer_kind
from mofa.blocks.elementwise import max_of_array_rows
from mofa.cost.kernels.collectives import collective_s
from mofa.cost.kernels.computing_slowdown import collective_slowdown
from mofa.cost.rows import GatheredRows, chunk_layer_params
from mofa.cost.step_time.fsdp_ends import backward_savings_of_layers
from mofa.cost.step_time.pipelined_fsdp import piece_seconds
from mofa.specs.params import layer_params

ArrayN = NDArray[np.float64]
ROUNDING = 1e-9
"""By how much of them two sums of the same seconds may be apart. [-]"""


@dataclass(frozen=True)
class ReplicaSumSeconds:
    """All-reduces of sharded gradients over replicas by piece, of each grid of ranks: of a layer of each kind,
    (kinds, g), of the embedding and of the other ends of the model, (g, R). [s]"""

    layer_s: ArrayN
    embedding_s: ArrayN
    other_ends_s: ArrayN


def replica_sum_seconds(rows: GatheredRows) -> ReplicaSumSeconds:
    """What summing each piece over the replicas takes."""
    grids, lay, model = rows.grids, rows.stage_layers, rows.workload.model
    dense, expert = np.maximum(rows.params - chunk_layer_params(rows.workload, grids, lay), 0.0).sum(axis=3)
    embedding = np.minimum((model.vocab * model.hidden / grids.tp)[:, None] * rows.is_embedding_stage, dense)
    each_s = [_sum_s(rows, embedding, 0.0 * expert), _sum_s(rows, dense - embedding, expert)]
    layers_s = []
    for kind in lay.stages.kinds:
        p = layer_params(model, kind.moe)
        of_dense = (p.matrices_tp + p.shared) / grids.tp + p.replicated
        of_expert = np.broadcast_to(p.routed / (grids.ep * grids.etp), of_dense.shape)
        layers_s.append(_sum_s(rows, of_dense[:, None], of_expert[:, None])[:, 0])
    return ReplicaSumSeconds(np.array(layers_s), *each_s)


def _sum_s(rows: GatheredRows, dense: ArrayN, expert: ArrayN) -> ArrayN:
    """Of a piece with so many parameters before they are sharded. (g, any) [s]"""
    group, fabric = rows.groups["dp_replicate"].with_indexed_arrays(np.s_[:, None]), rows.costs.machine.network_fabric
    own = dense / rows.shards.dense_ranks + expert / rows.shards.expert_ranks
    return np.asarray(collective_s("all_reduce", rows.framework.reduced_bytes_per_param * own, group, fabric))


def replica_all_reduce_s(rows: GatheredRows) -> tuple[ArrayN, ArrayN]:
    """All-reduces of each stage's sharded gradients over replicas, and that of the last piece. (n, R) each [s]

    The embedding's is the last on the stage that has it, a layer's elsewhere.
    """
    lay = rows.stage_layers
    if rows.framework.dp_replicate <= 1:
        nothing = np.zeros((len(rows.table), len(lay.shown.shown_stages)))
        return nothing, nothing
    counts = lay.stages.layer_counts[:, lay.shown.shown_stages].sum(axis=2)
    sums = replica_sum_seconds(rows)
    total = np.einsum("kr,kg->gr", counts.astype(float), sums.layer_s) + sums.embedding_s + sums.other_ends_s
    layer_s = np.max((counts[:, None] > 0) * sums.layer_s[:, :, None], axis=0)
    last = np.where(rows.is_embedding_stage > 0, sums.embedding_s, layer_s)
    return total[rows.grid_index], last[rows.grid_index]


def exposed_and_hidden_replica_all_reduces_s(rows: GatheredRows, backward_s: ArrayN) -> tuple[ArrayN, ArrayN]:
    """What replicas leave exposed of a backward on a single stage, and what is hidden. (n,) each [s]

    A piece's sum follows its reduction. Beside it computing loses in the share of the backward that the device is busy:
    with copies of gradients and weights, what these and computing lose beside other communication, and what they lose
    beside the sums. Of sums of T seconds beside a backward of B, of which b are busy, that is L in
    ``L = slow T (b + L) / (B + L)``. Where a communicator sets the time of layers, computing has that much slack.
    """
    if rows.framework.dp_replicate <= 1:
        nothing = np.zeros(len(backward_s))
        return nothing, nothing
    total, last = (seconds[:, 0] for seconds in replica_all_reduce_s(rows))
    curves, layers, machine = rows.cluster.gpu.curves, rows.layers, rows.costs.machine
    slow = collective_slowdown(curves, rows.groups["dp_replicate"], machine.network_fabric)[rows.grid_index]
    of_layers = collective_slowdown(curves, machine.groups["fsdp"], machine.network_fabric)
    busy = max_of_array_rows(
        rows.sum_layers_by_stage(layers.backward_busy_s + of_layers[:, None] * layers.backward_hidden_s)
    )
    # beside sums and gathers at once computing has what the one leaves of what the other leaves
    lost_aside_s = rows.sum_layers_by_stage(layers.stack_of_blocks(lambda cost: cost.backward.lost_aside))[:, 0]
    slow = slow * np.clip(1.0 - lost_aside_s / np.maximum(backward_s[:, 0], 1e-12), 0.0, 1.0)
    summed_s = np.maximum(_summed_after_s(rows, backward_s[:, 0]) - backward_s[:, 0], last)
    beside_s = np.clip(total - summed_s, 0.0, backward_s[:, 0])
    busy, beyond_s = np.minimum(busy, backward_s[:, 0]), backward_s[:, 0] - slow * beside_s
    slack_s = max_of_array_rows(rows.sum_layers_by_stage(layers.backward_slack_s))
    lost_s = (np.sqrt(beyond_s**2 + 4.0 * slow * beside_s * busy) - beyond_s) / 2.0
    lost_s = np.maximum(lost_s - slack_s, 0.0)
    left_s = np.maximum(summed_s - lost_s, last)
    hidden_s = total - left_s
    return left_s + lost_s, np.where(hidden_s > ROUNDING * total, hidden_s, 0.0)


def _summed_after_s(rows: GatheredRows, backward_s: ArrayN) -> ArrayN:
    """When all pieces are summed, from the beginning of a single stage's backward on, were computing to lose nothing by
    it. (n,) [s]

    Piece by piece from the last layer to the first: one is reduced behind its backward and the reduction ahead of it,
    and summed behind that and the sum ahead of it.
    """
    lay, grid, layers, sums = rows.stage_layers, rows.grid_index, rows.layers, replica_sum_seconds(rows)
    model, reduces, saved_s = (
        rows.workload.model,
        piece_seconds(rows, pipelined=False),
        backward_savings_of_layers(rows),
    )
    counts = np.maximum(lay.layer_counts[:, :, 0], 1e-12)
    plain, full = (layers.backward_s[mode, rows.k] for mode in (rows.base_mode_index, rows.full_mode_index))
    of_kinds_s = (lay.base_mode[:, :, 0] * plain + lay.fully_recomputed[:, :, 0] * full) / counts  # (n, kinds)
    kinds = [lay.stages.kinds.index(layer_kind(model, number)) for number in range(model.num_layers)]
    layers_s = [of_kinds_s[:, kind] - saved_s.get(number, 0.0) for number, kind in enumerate(kinds)]
    head_s, embedding_s = (block.backward.total_s[rows.k] for block in (rows.costs.head, rows.costs.embedding))
    # a host that is late in one layer is less so in another: together they may take less
    share = np.clip((backward_s - head_s - embedding_s) / np.sum(layers_s, axis=0), 0.0, 1.0)
    computed = np.minimum(head_s, backward_s)
    reduced = computed + np.where(sums.other_ends_s[grid, 0] > 0.0, reduces.end_reduce_s[grid, 0, 0], 0.0)
    reduced = np.minimum(reduced, backward_s)
    summed = reduced + sums.other_ends_s[grid, 0]
    for kind, layer_s in zip(reversed(kinds), reversed(layers_s), strict=True):
        computed = computed + share * layer_s
        reduced = np.maximum(reduced, computed) + reduces.layer_reduce_s[kind, grid]
        reduced = np.minimum(reduced, backward_s)  # the device waits for all reductions before it is over
        summed = np.maximum(summed, reduced) + sums.layer_s[kind, grid]
    return np.asarray(np.maximum(summed, backward_s) + sums.embedding_s[grid, 0])
