"""Load of experts and of ranks under uneven routing: from a distribution or counts to arrays of tokens per rank.

A *draw* is what the experts of one layer receive in one micro-batch, as shares that sum to 1. Everything here works on
arrays of shares with axes (iteration, layer, expert) or (iteration, layer, rank).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mofa.cost.block.routing_loads import RoutingLoads
from mofa.errors import SpecError
from mofa.routing.capacity import rerun_fraction, shares_under_capacity
from mofa.routing.counts import MAX_CELLS, read_counts
from mofa.routing.presets import memfine_iteration_7_shares
from mofa.specs.model import ModelSpec, MoeSpec
from mofa.specs.routing import RoutingSpec

FloatA = NDArray[np.float64]
FIELDS = {"zipf": "s", "dirichlet": "alpha", "lognormal": "sigma"}
"""The parameter of each distribution."""


def routing_loads(routing: RoutingSpec, model: ModelSpec, degrees: Sequence[int]) -> RoutingLoads:
    """Loads by routing: rows of the slowest rank, and of the rank that memory must hold, over the mean, per
    expert-parallel degree.

    Parameters
    ----------
    routing
        How tokens fall on experts.
    model
        The model with its experts; a model without experts is balanced.
    degrees
        Expert-parallel degrees, each a divisor of the number of experts. [ranks]

    Returns
    -------
    RoutingLoads
        ``slowest_rows_over_mean``: the slowest rank's rows over the mean, averaged over all draws (layers and
        iterations), because every layer of every micro-batch waits for its own slowest rank; it is also the ratio of
        the bytes of the all-to-all to and from that rank, since a row is a row there too. ``quantile_rows_over_mean``:
        the ``memory_quantile`` of rows over the mean, over draws and ranks together, as the smallest observed ratio
        that holds for that fraction of them; where that is below 1, 1. [-]

    Raises
    ------
    SpecError
        If a degree does not divide the experts, a model without experts has uneven routing, or the counts are wrong.

    Notes
    -----
    ``time = mean_draws(max_ranks(ep * share))``, ``memory = quantile_draws,ranks(ep * share)``; see
    :func:`expert_shares` for how shares are drawn and capped, and :func:`rank_shares` for what a rank holds. Both
    ratios are therefore at most ``ep * min(top_k, E / ep) / top_k``. With a ``capacity_factor`` the rows are those that
    are left (:func:`~mofa.routing.capacity.shares_under_capacity`), over the mean before dropping. A rank above the
    memory quantile is still met: at 0.999 once in 1000 ranks, layers and iterations; ``memory_quantile: 1.0`` holds the
    worst of the draws.

    With a ``rank_capacity_factor`` every rank of an expert-parallel group computes on rows padded to that multiple of
    the mean, and its memory holds them; bytes are sent unpadded. ``over`` is the share of draws in which some rank in
    some layer has more (:func:`~mofa.routing.capacity.rerun_fraction`); such a step runs again, without the budget, so
    that memory still holds the quantile.

    Counts of a file say besides what each layer gets: ``by_layer``, of every rank the ``memory_quantile`` of its
    iterations.

    The ratios do not depend on how many tokens a micro-batch has: shares are those of the distribution, without the
    scatter of finitely many tokens, so that balanced means exactly even, as do ``s = 0`` and ``sigma = 0``. Left out is
    a relative standard deviation of a rank's rows of about ``1 / sqrt(tokens * top_k)`` (0.6 % at 4096 tokens and top
    8) if tokens were routed independently, which those of one text are not; a distribution that is fitted to
    micro-batches holds it already. The degrees share their draws, so that the ratios never fall as ep grows.

    References
    ----------
    MemFine (arXiv 2511.21431), section 3, whose cap ``e * s`` is corrected to ``e * b * s * min(top_k, experts per
    rank)``: its own table 4 shows more than ``e * s`` rows on a rank.

    Examples
    --------
    >>> from mofa.specs.load import load_workload
    >>> model = load_workload("deepseek-v3").model
    >>> routing_loads(RoutingSpec(), model, [1, 8]).slowest_rows_over_mean
    {1: 1.0, 8: 1.0}
    >>> extreme = routing_loads(RoutingSpec(kind="zipf", s=10), model, [1, 8, 32, 256])
    >>> ratios = extreme.slowest_rows_over_mean
    >>> {ep: round(ratio, 6) for ep, ratio in ratios.items() if ep in (1, 256)}  # an expert: 256 / top 8
    {1: 1.0, 256: 32.0}
    """
    moe = _checked(routing, model, degrees)
    budget = routing.rank_capacity_factor
    if moe is None or (routing.kind == "balanced" and routing.capacity_factor is None and budget is None):
        return RoutingLoads(dict.fromkeys(degrees, 1.0), dict.fromkeys(degrees, 1.0))
    shares = expert_shares(routing, model)
    time: dict[int, float] = {}
    memory: dict[int, float] = {}
    sent: dict[int, float] = {}
    over: dict[int, float] = {}
    by_layer: dict[int, FloatA] = {}
    uneven: dict[int, float] = {}
    emptiest: dict[int, float] = {}
    least = 1.0
    if routing.capacity_factor is not None:
        shares = shares_under_capacity(shares, routing.capacity_factor, pad=routing.pad_to_capacity)
        least = 0.0  # what is dropped is not computed: the slowest rank may have less than the mean before
    for ep in degrees:
        ratios = ep * rank_shares(shares, ep)
        uneven[ep] = 0.0 if routing.pad_to_capacity else expert_load_deviation_of_slowest_rank(shares, ep)
        cap = max_rank_rows_over_mean(moe, ep)
        memory_ratio = float(np.quantile(ratios, routing.memory_quantile, method="inverted_cdf"))
        # The clips take away rounding alone, except for a quantile below the mean.
        time[ep] = min(max(float(ratios.max(axis=-1).mean()), least), max(cap, routing.capacity_factor or 0.0))
        memory[ep] = min(max(memory_ratio, least), max(cap, routing.capacity_factor or 0.0))
        if routing.kind == "counts" and budget is None and not routing.pad_to_capacity:
            by_layer[ep] = np.quantile(ratios, routing.memory_quantile, axis=0, method="inverted_cdf")
        if budget is None and not routing.pad_to_capacity:  # else all ranks hold as many
            emptiest[ep] = float(np.quantile(ratios, 1.0 - routing.memory_quantile, method="inverted_cdf"))
        if routing.pad_to_capacity:  # all send as much: what is padded is counted in the rows that they send
            sent[ep] = 1.0
        if budget is not None and ep > 1:
            sent[ep], time[ep], memory[ep] = time[ep], budget, max(memory[ep], budget)
            over[ep] = rerun_fraction(ratios, budget)
    before = np.inf if routing.steps_before is None else float(routing.steps_before)
    padded = routing.pad_to_capacity  # to one number of rows for all
    return RoutingLoads(
        time, memory, sent_bytes_over_mean=sent, over_budget_fraction=over, expert_rows_deviation=uneven,
        shares=None if padded else shares[0], steps_before=before,
        drifts=routing.drifts,
        by_layer=by_layer, emptiest=emptiest,
    )  # fmt: skip


def rank_loads(routing: RoutingSpec, model: ModelSpec, ep: int, tokens: float, iterations: int | None = None) -> FloatA:
    """Token copies that each rank of an expert-parallel group receives, per iteration and layer.

    Parameters
    ----------
    routing
        How tokens fall on experts.
    model
        The model; it must have experts.
    ep
        Expert-parallel degree, a divisor of the number of experts. [ranks]
    tokens
        Tokens of one micro-batch on one rank, before routing. [tokens]
    iterations
        How many: the first of the file, or so many draws of all layers; by default all of the file, or enough for
        ``samples`` draws of a layer, those of which :func:`routing_loads` gives the statistics.

    Returns
    -------
    FloatA
        Rows of each rank, not rounded to whole ones; over the ranks they sum to ``ep * tokens * top_k``. (I, L, ep)
        [tokens]

    Notes
    -----
    ``ep * tokens * top_k * share``, at most ``ep * tokens * min(top_k, E / ep)``. Counts of a file are read as the
    distribution of one micro-batch and scaled to its tokens; where the file's iteration sums over many, the spread
    between micro-batches is lost.

    Examples
    --------
    >>> from mofa.specs.load import load_workload
    >>> model = load_workload("mixtral-8x7b").model
    >>> rank_loads(RoutingSpec(), model, ep=4, tokens=4096, iterations=1)[0, 0]
    array([8192., 8192., 8192., 8192.])
    >>> rows = rank_loads(RoutingSpec(kind="lognormal", sigma=1), model, ep=4, tokens=4096)
    >>> rows.shape, bool(np.allclose(rows.sum(axis=-1), 4 * 4096 * 2)), bool(rows.max() <= 4 * 4096 * 2)
    ((8, 32, 4), True, True)
    """
    moe = _checked(routing, model, [ep])
    if moe is None:
        raise SpecError(f"model {model.name}: has no layer with experts; only those have a routing load")
    return ep * tokens * moe.top_k * rank_shares(expert_shares(routing, model, iterations), ep)


def expert_shares(routing: RoutingSpec, model: ModelSpec, iterations: int | None = None) -> FloatA:
    """Share of the routed token copies that each expert gets, per iteration and layer.

    Parameters
    ----------
    routing
        How tokens fall on experts.
    model
        The model; it must have experts.
    iterations
        As in :func:`rank_loads`.

    Returns
    -------
    FloatA
        Shares, which sum to 1 over the experts; none above ``1 / top_k``. (I, L, E) [-]

    Notes
    -----
    Presets: :mod:`mofa.routing.presets`. Zipf: ``i**-s`` for the i-th most popular expert, which experts those are
    being a random order per draw. Dirichlet and lognormal: independent draws, normalised. Layers and iterations are
    independent and alike (a preset's layers differ); a real run's differ by depth and drift, which counts from a file
    show. With the same seed, draws at another ``s`` or ``sigma`` differ by the skew alone.

    The distribution is that of the load, not of the router's scores. A token sends at most one copy to an expert, so
    that an expert gets at most all tokens, ``1 / top_k`` of the copies; see :func:`cap_and_redistribute_shares`.
    """
    moe = model.moe
    if moe is None or not model.num_moe_layers:
        raise SpecError(f"model {model.name}: has no layer with experts; only those have a routing load")
    if iterations is not None and iterations < 1:
        raise SpecError(f"iterations ({iterations}) must be at least 1")
    if routing.kind == "counts":
        shares = _counted_shares(routing, model, iterations)
    else:
        layers = model.num_moe_layers
        count = -(-routing.samples // layers) if iterations is None else iterations
        if count * layers * moe.num_experts > MAX_CELLS:
            raise SpecError(
                f"routing.samples ({routing.samples}): {count} iterations of {layers} layers and {moe.num_experts} "
                f"experts are more than {MAX_CELLS} numbers; draw fewer"
            )
        if routing.kind == "preset":
            by_layer = np.broadcast_to(
                memfine_iteration_7_shares(layers, moe.num_experts), (count, layers, moe.num_experts)
            )
            shares = np.random.default_rng(routing.seed).permuted(by_layer, axis=-1)
        else:
            shares = draw_expert_shares(routing, (count * layers, moe.num_experts)).reshape(
                count, layers, moe.num_experts
            )
    return cap_and_redistribute_shares(shares, 1.0 / moe.top_k)


def draw_expert_shares(routing: RoutingSpec, shape: tuple[int, int]) -> FloatA:
    """Shares drawn from a distribution of one parameter, before the cap: (draws, E), each draw sums to 1. [-]

    >>> draw_expert_shares(RoutingSpec(), (1, 4))
    array([[0.25, 0.25, 0.25, 0.25]])
    """
    logits = _log_weights(routing, shape)
    logits -= logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits, out=logits)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _counted_shares(routing: RoutingSpec, model: ModelSpec, iterations: int | None) -> FloatA:
    assert routing.file is not None
    tokens = read_counts(routing.file, model).tokens
    if iterations is not None and iterations > len(tokens):
        raise SpecError(f"iterations ({iterations}): routing.file {routing.file} holds {len(tokens)}; ask for fewer")
    tokens = tokens[:iterations]
    return np.asarray(tokens / tokens.sum(axis=-1, keepdims=True))


def _log_weights(routing: RoutingSpec, shape: tuple[int, int]) -> FloatA:
    """Logarithms of unnormalised shares, in which no skew overflows. (draws, E)"""
    rng = np.random.default_rng(routing.seed)
    if routing.kind == "zipf":
        assert routing.s is not None
        logits = -routing.s * np.log(np.arange(1.0, shape[1] + 1.0))
        return rng.permuted(np.broadcast_to(logits, shape), axis=-1)
    if routing.kind == "lognormal":
        assert routing.sigma is not None
        return routing.sigma * rng.standard_normal(shape)
    if routing.kind == "dirichlet":
        assert routing.alpha is not None
        # Gamma(a) is Gamma(a + 1) * U**(1 / a), whose logarithm stays finite where Gamma(a) itself underflows to 0.
        boosted = np.log(rng.standard_gamma(routing.alpha + 1.0, shape))
        return np.asarray(boosted - rng.standard_exponential(shape) / routing.alpha)
    return np.zeros(shape)


def cap_and_redistribute_shares(shares: FloatA, cap: float) -> FloatA:
    """Shares with none above the cap; the excess goes to the others in proportion to what they have.

    Parameters
    ----------
    shares
        Shares, which sum to 1 over the last axis. (..., E) [-]
    cap
        The largest share allowed, at least ``1 / E``. [-]

    Returns
    -------
    FloatA
        Shares that sum to 1, in the same order of size. (..., E) [-]

    Notes
    -----
    ``min(cap, scale * share)`` with the one scale that makes the sum 1: a token that has already sent a copy to its
    favourite chooses among the other experts as all tokens do. Where the others have nothing at all, they share the
    excess evenly. The result is flatter than what was asked for, as a router that picks top_k different experts must
    be. The cap on a *rank*, ``min(1, (E / ep) / top_k)`` of the copies, which is ``ep * b * s * min(top_k, E / ep)``
    rows, follows from the cap of ``1 / top_k`` on each of its ``E / ep`` experts.

    Examples
    --------
    >>> cap_and_redistribute_shares(np.array([0.7, 0.2, 0.1, 0.0]), 0.5)  # 0.2 over, given to 0.2 and 0.1 as two to one
    array([0.5       , 0.33333333, 0.16666667, 0.        ])
    >>> cap_and_redistribute_shares(np.array([1.0, 0.0, 0.0, 0.0]), 0.5)
    array([0.5       , 0.16666667, 0.16666667, 0.16666667])
    """
    over = shares.max(axis=-1) > cap
    if not over.any():
        return shares
    num = shares.shape[-1]
    order = np.argsort(-shares[over], axis=-1, kind="stable")
    ranked = np.take_along_axis(shares[over], order, axis=-1)
    # With the j largest at the cap, 1 - j * cap is left for the others in proportion; the smallest j will do at which
    # the largest of those others stays below the cap. There is one: j = top_k leaves nothing.
    left = np.maximum(1.0 - cap * np.arange(num), 0.0)
    rest = np.cumsum(ranked[:, ::-1], axis=-1)[:, ::-1]
    largest = _fraction(ranked, rest, 1.0 / np.arange(num, 0, -1))
    at_cap = np.argmax(left * largest <= cap * (1 + 1e-12), axis=-1)[:, None]
    fraction = _fraction(ranked, np.take_along_axis(rest, at_cap, axis=-1), 1.0 / (num - at_cap))
    filled = np.where(np.arange(num) < at_cap, cap, np.minimum(left[at_cap] * fraction, cap))
    result = shares.copy()
    capped = np.empty_like(filled)
    np.put_along_axis(capped, order, filled, axis=-1)
    result[over] = capped
    return result


def _fraction(part: FloatA, total: FloatA, otherwise: FloatA) -> FloatA:
    """``part / total``, at most 1, or otherwise where ``total`` is 0."""
    out = np.broadcast_to(otherwise, part.shape).copy()
    return np.divide(np.minimum(part, total), total, out=out, where=np.broadcast_to(total > 0, part.shape))


def rank_shares(shares: FloatA, ep: int) -> FloatA:
    """Share of each rank: experts lie in order, ``E / ep`` consecutive ones on a rank.

    Parameters
    ----------
    shares
        Shares of the experts. (..., E) [-]
    ep
        Expert-parallel degree, a divisor of E. [ranks]

    Returns
    -------
    FloatA
        Shares of the ranks. (..., ep) [-]

    Examples
    --------
    >>> rank_shares(np.array([0.5, 0.25, 0.25, 0.0]), 2)
    array([0.75, 0.25])
    """
    return np.asarray(shares.reshape(*shares.shape[:-1], ep, -1).sum(axis=-1))


def expert_load_deviation_of_slowest_rank(shares: FloatA, ep: int) -> float:
    """Standard deviation of the experts of a draw's slowest rank over their mean, averaged over the draws. [-]

    Parameters
    ----------
    shares
        Shares of the experts. (..., E) [-]
    ep
        Expert-parallel degree, a divisor of E. [ranks]

    Examples
    --------
    >>> expert_load_deviation_of_slowest_rank(np.array([[0.5, 0.25, 0.125, 0.125]]), 2).__round__(3)
    0.333
    """
    ranks = shares.reshape(-1, ep, shares.shape[-1] // ep)
    slowest = ranks[np.arange(len(ranks)), ranks.sum(axis=-1).argmax(axis=-1)]
    return float(np.mean(slowest.std(axis=-1) / np.maximum(slowest.mean(axis=-1), 1e-300)))


def max_rank_rows_over_mean(moe: MoeSpec, ep: int) -> float:
    """The most rows a rank can get, over the mean: every token sends all the copies it can to one rank. [-]

    ``ep * b * s * min(top_k, E / ep)`` rows over the mean ``b * s * top_k``.

    >>> moe = MoeSpec(num_experts=256, top_k=8, expert_hidden=2048)
    >>> max_rank_rows_over_mean(moe, 64)  # 4 experts a rank: 4 of 8 copies
    32.0
    """
    return ep * min(moe.top_k, moe.num_experts // ep) / moe.top_k


def _checked(routing: RoutingSpec, model: ModelSpec, degrees: Sequence[int]) -> MoeSpec | None:
    moe = model.moe
    if moe is None or not model.num_moe_layers:
        if routing.kind != "balanced":
            raise SpecError(
                f"routing.kind: {routing.kind}, but {model.name} has no layer with experts; leave routing balanced"
            )
        return None
    for ep in degrees:
        if ep < 1 or moe.num_experts % ep:
            raise SpecError(
                f"ep ({ep}) must divide num_experts ({moe.num_experts}) of {model.name}; every rank holds equally many"
            )
    return moe
