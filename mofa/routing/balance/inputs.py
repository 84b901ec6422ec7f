"""Tokens that every GPU of a group has for every expert: drawn from shares, or as a trace counted them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mofa.errors import SpecError

FloatA = NDArray[np.float64]
IntA = NDArray[np.int64]
MAX_CELLS = 2**26


def draw_tokens_per_gpu(shares: FloatA, tokens_per_gpu: int, num_gpus: int, seed: int = 0) -> IntA:
    """Tokens that every GPU has for every expert, drawn independently. (I, L, E) or (I, L, E, G) -> (I, L, E, G)

    >>> drawn = draw_tokens_per_gpu(np.full((2, 1, 4), 0.25), 100, 3)
    >>> drawn.shape, drawn.sum(axis=2).tolist()
    ((2, 1, 4, 3), [[[100, 100, 100]], [[100, 100, 100]]])
    """
    if tokens_per_gpu < 1:
        raise SpecError(f"tokens ({tokens_per_gpu}) of a GPU must be at least 1; route more")
    iterations, layers, experts = shares.shape[:3]
    if iterations * layers * experts * num_gpus > MAX_CELLS:
        raise SpecError(
            f"{iterations} micro-batches of {layers} layers, {experts} experts and {num_gpus} GPUs are more than "
            f"{MAX_CELLS} numbers; play fewer micro-batches"
        )
    rng = np.random.default_rng(seed)
    of_gpu = np.broadcast_to(shares if shares.ndim == 4 else shares[..., None], (iterations, layers, experts, num_gpus))
    return np.asarray(np.moveaxis(rng.multinomial(tokens_per_gpu, np.moveaxis(of_gpu, 3, 2)), 3, 2))


def deal_tokens_to_gpus(loads: IntA, num_gpus: int, seed: int = 0) -> IntA:
    """Counted tokens of the experts, dealt out to source GPUs at random. (I, L, E) -> (I, L, E, G) [tokens]

    >>> deal_tokens_to_gpus(np.array([[[6, 2]]]), 2).sum(axis=-1).tolist()
    [[[6, 2]]]
    """
    if loads.size * num_gpus > MAX_CELLS:
        raise SpecError(f"{loads.shape[0]} iterations on {num_gpus} GPUs are more than {MAX_CELLS} numbers; keep fewer")
    rng = np.random.default_rng(seed)
    return np.asarray(rng.multinomial(loads, np.full(num_gpus, 1.0 / num_gpus)))


def tokens_per_gpu_of_source_counts(by_source: IntA, num_gpus: int, seed: int = 0) -> IntA:
    """Tokens that every GPU has, of those counted by source rank. (I, L, E, S) -> (I, L, E, G) [tokens]

    As many source ranks as GPUs are those GPUs. Of a multiple, neighbours are put together; a part stand each for
    as many GPUs, to which their tokens are dealt out at random.

    Raises
    ------
    SpecError
        If neither number divides the other.

    Examples
    --------
    >>> tokens_per_gpu_of_source_counts(np.array([[[[5, 1, 0, 2]]]]), 2).tolist()
    [[[[6, 2]]]]
    """
    sources = _checked_sources(by_source, num_gpus)
    if sources >= num_gpus:
        return np.asarray(by_source.reshape(*by_source.shape[:3], num_gpus, -1).sum(axis=-1))
    return deal_tokens_to_gpus(by_source, num_gpus // sources, seed).reshape(*by_source.shape[:3], num_gpus)


def token_shares_of_source_counts(by_source: FloatA, num_gpus: int) -> FloatA:
    """Which part of its tokens every GPU has for every expert, of counts by source rank. (I, L, E, S) -> (I, L, E, G)

    Ranks become GPUs as in :func:`tokens_per_gpu_of_source_counts`; a GPU without any tokens has the shares of all
    together.

    >>> token_shares_of_source_counts(np.array([[[[3.0, 0.0], [1.0, 0.0]]]]), 2).tolist()
    [[[[0.75, 0.75], [0.25, 0.25]]]]
    """
    sources = _checked_sources(by_source, num_gpus)
    shape = by_source.shape[:3]
    if sources >= num_gpus:
        tokens = by_source.reshape(*shape, num_gpus, -1).sum(axis=-1)
    else:
        tokens = np.repeat(by_source, num_gpus // sources, axis=3)
    together = np.broadcast_to(by_source.sum(axis=3, keepdims=True), tokens.shape)
    tokens = np.where(tokens.sum(axis=2, keepdims=True) > 0, tokens, together)
    return np.asarray(tokens / tokens.sum(axis=2, keepdims=True))


def _checked_sources(by_source: NDArray[Any], num_gpus: int) -> int:
    sources = int(by_source.shape[3])
    if sources % num_gpus and num_gpus % sources:
        raise SpecError(
            f"column source_rank: {sources} ranks are no multiple and no part of the merged group's {num_gpus} GPUs; "
            "leave the column out or balance another group"
        )
    return sources
