"""How many token chunks a layer needs: MemFine's memory model, its rule for the number of chunks, and controllers.

The rule needs to know how many rows a rank's memory can take. MemFine computes that from its table of activations
(here :func:`memfine_layer_activations`); the planner from its own tapes (:mod:`mofa.search.experts.token_chunks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError
from mofa.specs.model import ModelSpec
from mofa.specs.params import layer_params
from mofa.specs.ranges import MOST_LOAD_FACTOR

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
BINS = (1, 2, 4, 8)
"""MemFine, section 5.1."""
MAX_BIN = 64
ELEMENT_BYTES = 2.0


@dataclass(frozen=True)
class ActivationTerms:
    """Activations of one layer and micro-batch: ``fixed_bytes + bytes_per_row * rows / chunks``. [B], [B/row]"""

    fixed_bytes: float
    bytes_per_row: float

    def activation_bytes(self, rows: float, chunks: int = 1) -> float:
        """With so many rows on the rank, in so many chunks. [B]

        >>> ActivationTerms(1.0, 2.0).activation_bytes(8.0, 4)
        5.0
        """
        return self.fixed_bytes + self.bytes_per_row * rows / chunks


def memfine_layer_activations(
    model: ModelSpec, seq_len: int, micro_batch: int = 1, tp: int = 1, cp: int = 1
) -> ActivationTerms:
    """MemFine's activations of one layer (table 2, equation 2 with one layer live).

    Notes
    -----
    ``(D b / (t c)) [s (5h + a h_d + 2 k_a h_d + e) + s' (2h + 2 g_e)]`` with ``D`` 2 bytes, ``h_d`` the head dimension
    of queries and keys, ``e`` the experts, ``g_e`` an expert's width. Its table leaves out one operand of SwiGLU and
    counts the rows entering and leaving the experts; what Megatron really keeps is in the tapes.

    References
    ----------
    MemFine, arXiv 2511.21431, table 2 and equation 2; ``e_n``, printed as a width, is the number of experts.

    Examples
    --------
    >>> from mofa.specs.load import load_workload
    >>> terms = memfine_layer_activations(load_workload("memfine-model-1").model, 4096)
    >>> round(terms.fixed_bytes / 1e9, 3), terms.bytes_per_row
    (0.9, 36864.0)
    """
    if model.moe is None:
        raise SpecError(f"model {model.name}: has no layer with experts; only those are chunked")
    a, h = model.attention, float(model.hidden)
    unit = ELEMENT_BYTES * micro_batch / (tp * cp)
    width = 5 * h + a.num_heads * a.d_qk + 2 * a.num_kv_heads * a.d_qk + model.moe.num_experts
    return ActivationTerms(unit * seq_len * width, unit * (2 * h + 2 * model.moe.expert_hidden))


def memfine_static_bytes(model: ModelSpec, layers: int, ep: int, bytes_per_param: float) -> float:
    """MemFine's static memory of a rank (equation 1): weights, gradients, optimizer of its layers with experts. [B]

    Parameters
    ----------
    layers
        Layers of the rank, ``v l``. The paper's ``l = L`` says all, its ``p = 4`` a quarter. [-]
    ep
        Expert-parallel degree that the experts are split over. [ranks]
    bytes_per_param
        ``D_para + D_grad + 4 D_opt``, whose terms are not printed. [B]

    Notes
    -----
    As printed: no embedding, no head, dense layers like the others, nothing sharded over data parallelism.

    Examples
    --------
    >>> from mofa.specs.load import load_workload
    >>> round(memfine_static_bytes(load_workload("memfine-model-1").model, 4, 32, 20.0) / 1e9, 1)
    46.8
    """
    layer = layer_params(model, moe=True)
    return layers * bytes_per_param * (layer.total_params - layer.routed + layer.routed / ep)


def memfine_layers_in_flight(pp: int, stage: int, vpp: int = 1) -> int:
    """Layer activations in flight as MemFine counts them, ``v p + p - 2 r - 1``: of chunks under interleaving. [-]

    >>> memfine_layers_in_flight(4, 0), micro_batches_in_flight_1f1b(4, 0)
    (7, 4)
    """
    return vpp * pp + pp - 2 * stage - 1


def micro_batches_in_flight_1f1b(pp: int, stage: int) -> int:
    """Micro-batches in flight under plain 1F1B, ``p - r``: the published count corrected for one chunk a stage. [-]"""
    return pp - stage


def max_rows_without_chunks(budget_bytes: float, terms: ActivationTerms, layers_in_flight: float = 1.0) -> float:
    """Rows of a rank that its memory can take without chunks (equation 8). [rows]

    Parameters
    ----------
    budget_bytes
        Memory left for activations: ``alpha M - M_static``. [B]
    terms
        Of one layer.
    layers_in_flight
        Layers whose activations are held at once: micro-batches in flight times layers of the stage, or 1 where the
        layer is recomputed. The paper's formula leaves the layers of a stage out. [-]

    Returns
    -------
    float
        Negative where not even the part without rows fits.

    Examples
    --------
    >>> max_rows_without_chunks(10.0, ActivationTerms(2.0, 4.0))
    2.0
    """
    return (budget_bytes / layers_in_flight - terms.fixed_bytes) / terms.bytes_per_row


def check_chunk_bins(bins: Sequence[int]) -> tuple[int, ...]:
    """Bins in order, or an error.

    >>> check_chunk_bins([4, 1, 2])
    (1, 2, 4)
    """
    ordered = tuple(sorted(set(bins)))
    if not ordered or ordered[0] < 1 or ordered[-1] > MAX_BIN:
        raise SpecError(f"bins ({', '.join(map(str, bins))}): must be whole numbers from 1 to {MAX_BIN}; write 1,2,4,8")
    return ordered


def choose_num_chunks(rows: FloatA, most: FloatA | float, bins: Sequence[int] = BINS) -> IntA:
    """MACT: the smallest bin of at least ``ceil(rows / most)`` chunks; 0 where no bin will do.

    Parameters
    ----------
    rows
        Rows of the fullest rank, per iteration and layer. (I, L) [rows]
    most
        Rows that the memory of the layer's stage can take. (L,) [rows]
    bins
        Numbers of chunks that may be chosen.

    References
    ----------
    MemFine, arXiv 2511.21431, equation 9 and section 4.2.

    Examples
    --------
    >>> choose_num_chunks(np.array([[50.0, 101.0, 300.0, 900.0]]), 100.0).tolist()
    [[1, 2, 4, 0]]
    """
    capacity = np.asarray(most, dtype=np.float64)
    wanted = np.where(capacity > 0, np.ceil(rows / np.where(capacity > 0, capacity, 1.0) - 1e-9), np.inf)
    sizes = np.array([0, *check_chunk_bins(bins)])
    place = np.searchsorted(sizes[1:], np.maximum(wanted, 1.0))
    return np.asarray(np.append(sizes[1:], 0)[place], dtype=np.int64)


def loads_expected_from_past(ratios: FloatA, window: int = 5, headroom: float = 1.25) -> FloatA:
    """Loads that a controller expects which sees past iterations alone: the largest of late, with headroom. (I, L) [-]

    The first iteration has no past and expects the largest load possible, as infinity.

    >>> loads_expected_from_past(np.array([[2.0], [1.0], [3.0]]), window=1, headroom=1.5).ravel().tolist()
    [inf, 3.0, 1.5]
    """
    if window < 1 or not 1 <= headroom <= MOST_LOAD_FACTOR:
        raise SpecError(
            f"window ({window}) must be at least 1 iteration, headroom ({headroom:g}) from 1 to {MOST_LOAD_FACTOR:g}"
        )
    expected = np.full_like(ratios, np.inf)
    for i in range(1, len(ratios)):
        expected[i] = headroom * ratios[max(i - window, 0) : i].max(axis=0)
    return expected
