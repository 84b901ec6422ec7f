"""What the model's two ends share: FSDP's root that holds both, as in torchtitan until July 2025
(``ends_apart: false``), and the gradient of a weight that both use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mofa.blocks.elementwise import broadcast_to_combinations
from mofa.blocks.frameworks.megatron.transformer_engine import padded_vocab_per_rank
from mofa.cost.rank_rules import head_gradient_waits_for_embedding
from mofa.cost.rows import GatheredRows

ArrayN = NDArray[np.float64]


def keeps_model_ends_gathered(rows: GatheredRows) -> bool:
    """Whether the embedding and the head stay gathered from the lookup to its backward."""
    return not rows.framework.ends_apart and rows.mode.precision == "mixed" and not rows.mode.pipelined


def gathers_model_ends_separately(rows: GatheredRows) -> bool:
    """Whether FSDP gathers the embedding and the head as groups of their own, anew for a backward."""
    fw = rows.framework
    return rows.mode.precision == "mixed" and not rows.mode.pipelined and fw.shards_params and fw.ends_apart


def keeps_embedding_gathered(rows: GatheredRows) -> bool:
    """Whether the embedding stays gathered while layers run: the root's, or where FSDP lets nothing go before its
    backward."""
    return keeps_model_ends_gathered(rows) or (
        gathers_model_ends_separately(rows) and not rows.framework.reshard_after_forward
    )


def embedding_gathered_bytes(rows: GatheredRows) -> ArrayN | float:
    """What is gathered of the embedding, or of the root, there while the layers keep what they do. (n, R) [B]"""
    if not keeps_embedding_gathered(rows):
        return 0.0
    return np.asarray(rows.costs.embedding.memory.saved[rows.k][:, None] * rows.is_embedding_stage)


def waiting_head_gradient_bytes(rows: GatheredRows) -> ArrayN | float:
    """The head's 16-bit gradients that wait while the layers go back: for the root's reduction, or for the embedding's
    of the same weight. (n, 1) [B]"""
    model = rows.workload.model
    if keeps_model_ends_gathered(rows):
        return np.asarray(2.0 * model.vocab * model.hidden / rows.table.tp)[:, None]
    return tied_head_gradient_bytes(rows)


def tied_head_gradient_bytes(rows: GatheredRows) -> ArrayN | float:
    """The head's 16-bit gradient while it waits for the embedding's. (n, 1) [B]"""
    if not head_gradient_waits_for_embedding(rows):
        return 0.0
    nbytes = 2.0 * np.asarray(padded_vocab_per_rank(rows.costs.context)) * rows.workload.model.hidden
    return broadcast_to_combinations(nbytes, rows.costs.machine.num_k)[rows.k][:, None]
