"""What a prediction rests on: the provenance of the facts behind each component of the step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from mofa.blocks.elementwise import PLAIN, FloatK
from mofa.blocks.op import Tape
from mofa.blocks.work import (
    Attention,
    Gemm,
    GroupedGemm,
    GroupedKernel,
    MemoryBound,
)
from mofa.cost.breakdown import TIME_COMPONENTS
from mofa.specs.base import PROVENANCES, Fact, Provenance
from mofa.specs.curves import FittedCurve
from mofa.specs.hardware import ClusterSpec
from mofa.specs.products import STREAM_FALLBACK, GemmFormat, known_or_stand_in_format

SIZES: tuple[tuple[str, type, dict[str, str]], ...] = (
    ("gemm", Gemm, {"m": "m", "n": "n", "k": "k"}),
    ("grouped_gemm", GroupedGemm, {"tokens": "rows", "groups": "groups", "n": "n", "k": "k"}),
    ("attention", Attention, {"q": "q_len"}),
)
"""Works whose sizes a curve's measured ranges name, by family, and their names there."""
_WEAKEST: dict[Provenance, int] = {p: i for i, p in enumerate(PROVENANCES)}
Sizes = Mapping[str, tuple[float, float]]
"""Smallest and largest of each size that occurs, by the names of a curve's measured ranges."""
Seen = tuple[Mapping[str, Sizes], frozenset[str]]
"""What occurs in one candidate's tapes: of :func:`op_size_ranges_by_family` and :func:`memory_bound_op_names`."""


def weakest_provenance(*facts: Fact) -> Provenance:
    """The least certain provenance of several facts."""
    return _least(*(fact.provenance for fact in facts))


def _least(*kinds: Provenance) -> Provenance:
    return max(kinds, key=lambda p: _WEAKEST[p])


def provenance_of_curve(curve: FittedCurve, sizes: Sizes | None = None) -> Provenance:
    """What a time rests on that a curve gave: a measured fit interpolates, and extrapolates outside its range.

    Examples
    --------
    >>> from mofa.specs.curves import FittedCurve
    >>> fitted = FittedCurve(provenance="measured", source="a run", ranges={"m": (64, 8192)})
    >>> provenance_of_curve(fitted, {"m": (128, 4096)}), provenance_of_curve(fitted, {"m": (128, 65536)})
    ('interpolated', 'extrapolated')
    """
    for name, (low, high) in (sizes or {}).items():
        least, most = curve.ranges.get(name, (low, high))
        if low < least or high > most:
            return _least("extrapolated", curve.provenance)
    return "interpolated" if curve.provenance == "measured" else curve.provenance


def op_size_ranges_by_family(tapes: Iterable[Tape]) -> dict[str, Sizes]:
    """Smallest and largest of each size that the ops of tapes of one candidate have, by family.

    Named as the curves' measured ranges: ``gemm`` m, n, k; ``grouped_gemm`` tokens, groups, n, k; ``attention`` q.
    """
    works = {id(op.work): op.work for tape in tapes for op in tape.ops}.values()
    sizes: dict[str, Sizes] = {}
    for family, kind, names in SIZES:
        some = [work for work in works if type(work) is kind]
        sizes[family] = {name: _span([getattr(w, field) for w in some]) for name, field in names.items() if some}
    return sizes


def memory_bound_op_names(tapes: Iterable[Tape]) -> frozenset[str]:
    """Measured ops that the memory-bound ops of one candidate's tapes are like."""
    works = [op.work for tape in tapes for op in tape.ops if type(op.work) is MemoryBound]
    names = {work.like for work in works} | {like for work in works for _, like in work.parts}
    return frozenset([name.rpartition(" ")[2] for name in names])


def _span(sizes: list[FloatK]) -> tuple[float, float]:
    plain = [float(size) if isinstance(size, PLAIN) else float(size.item()) for size in sizes]
    return min(plain), max(plain)


ALIGNED = {"bf16": 8}
"""Elements in 16 bytes, of which rows should be whole multiples for tensor cores to be used at their best (NVIDIA,
Matrix Multiplication Background User's Guide, section 2.2); fp8 products refuse others
(:mod:`mofa.search.legality.fp8_sizes`)."""


def unaligned_product_ops(tapes: Iterable[Tape]) -> dict[int, tuple[str, ...]]:
    """Widths and depths (n, k) of the products of one candidate that 16 bytes do not divide, and which ops have them.

    The forward passes are enough: the products of the backward ones have the same operands. Several products in one
    kernel are left out, whose rate was measured (:class:`mofa.specs.gpu_facts.UnalignedProductRates`).
    """
    names_of: dict[int, dict[str, None]] = {}
    for op in (op for tape in tapes for op in tape.ops):
        work = op.work
        if (
            isinstance(work, (Gemm, GroupedGemm))
            and work.format in ALIGNED
            and not (type(work) is Gemm and _several(work))
        ):
            for size in set(_span([work.n, work.k])):
                if size % ALIGNED[work.format]:
                    names_of.setdefault(int(size), {})[op.name] = None
    return {size: tuple(names_of[size]) for size in sorted(names_of)}


def is_unaligned_product(work: Gemm) -> bool:
    """Whether a product of one candidate has a width or depth that 16 bytes do not divide."""
    return work.format in ALIGNED and any(size % ALIGNED[work.format] for size in _span([work.n, work.k]))


def _several(work: Gemm) -> bool:
    return _span([work.count])[1] > 1.0


OPTIMIZER = frozenset({"adam_fused", "adam_foreach", "grad_norm", "grad_clip", "cast_down", "zero"})
"""Measured ops that an optimizer's step is made of."""


def _of_streams(curves: Mapping[str, FittedCurve], names: frozenset[str] | None) -> Provenance:
    """The least certain of the ops that occur, eager and compiled, and of the general rate."""
    wanted = [c for key, c in curves.items() if key == "default" or names is None or key.split()[-1] in names]
    known = {key.split()[-1] for key in curves}
    stand_ins: list[Provenance] = ["transferred" for name in names or () if name in STREAM_FALLBACK.keys() - known]
    return _least(*map(provenance_of_curve, wanted), *stand_ins)


def _of_product(curves: Mapping[GemmFormat, FittedCurve], kind: GemmFormat, sizes: Sizes | None) -> Provenance:
    """Of a kind of products, or of the kind that stands in, whose measurements are transferred."""
    if kind in curves:
        return provenance_of_curve(curves[kind], sizes)
    return _least("transferred", provenance_of_curve(curves[known_or_stand_in_format(kind, curves)], sizes))


def component_provenance(
    cluster: ClusterSpec,
    formats: Collection[GemmFormat],
    crosses: Mapping[str, bool],
    *,
    sizes: Mapping[str, Sizes] | None = None,
    streams: frozenset[str] | None = None,
    ranks: Mapping[str, int] | None = None,
    backend: str = "cudnn",
    grouped_kernel: GroupedKernel = "one",
) -> dict[str, Provenance]:
    """The provenance of each time component.

    Parameters
    ----------
    formats
        Kinds of the layers' products.
    crosses
        Which groups leave their fast domain.
    sizes
        The shapes that occur, by ``gemm``, ``grouped_gemm``, ``attention``; without them all count as inside the
        measured range.
    streams
        The measured ops that memory-bound ops are like, of :func:`memory_bound_op_names`; without them all that the GPU
        has.
    ranks
        Size of each group; a larger one than any measured is extrapolated.
    backend
        Of attention.
    grouped_kernel
        How experts' products run.
    """
    curves, node = cluster.gpu.curves, cluster.node
    sizes_of = sizes or {}
    tiers = [tier.oversubscription for tier in node.nic.tiers]
    outside = weakest_provenance(node.nic.efficiency, node.nic.latency_s, *tiers)
    outside_a2a = weakest_provenance(node.nic.all_to_all_efficiency, node.nic.latency_s, *tiers)
    stream = _of_streams(curves.stream, streams)
    kernels = [curve for key, curve in curves.attention.items() if key.split()[0] == backend]
    attention = _least(
        *(provenance_of_curve(curve, sizes_of.get("attention")) for curve in kernels or curves.attention.values())
    )
    in_streams = grouped_kernel == "multi-stream"
    experts: dict[GemmFormat, FittedCurve] = {**(curves.multi_stream_curves if in_streams else curves.grouped_gemm)}
    out: dict[str, Provenance] = {
        "gemm": _least(*(_of_product(curves.gemm, f, sizes_of.get("gemm")) for f in formats)),
        "grouped_gemm": _least(*(_of_product(experts, f, sizes_of.get("grouped_gemm")) for f in formats)),
        "attention": attention,
        "memory_bound": stream,
        "host_idle": weakest_provenance(curves.host.eager_op_s, curves.host.sync_s),
        "optimizer": _of_streams(curves.stream, None if streams is None else OPTIMIZER),
    }
    out["recompute"] = _least(out["gemm"], out["grouped_gemm"], out["attention"], stream)
    for name, kind in (("tp", "all_gather"), ("cp", "all_gather"), ("pp", "send_recv"), ("dp", "all_gather")):
        out[name] = outside if crosses.get(name, False) else _inside(cluster, kind, (ranks or {}).get(name, 2))
    out["ep"] = outside_a2a if crosses.get("ep", False) else _inside(cluster, "all_to_all", (ranks or {}).get("ep", 2))
    out["bubble"] = out["recompute"]
    slow = node.slow_nodes
    of_spreads = curves.chip_spread, curves.step_jitter, *(() if slow is None else (slow.share, slow.slowdown))
    known = [fact for fact in of_spreads if fact is not None]
    out["stragglers"] = weakest_provenance(*known) if known else out["recompute"]
    assert set(out) == set(TIME_COMPONENTS)
    return out


def _inside(cluster: ClusterSpec, kind: str, ranks: int) -> Provenance:
    """Of a collective inside a fast domain: its fitted form's, or the link's."""
    node = cluster.node
    measured = {c.form.group: c for key, c in node.collectives.items() if key.split()[0] == kind}
    if not measured:
        share = node.intra.all_to_all_efficiency if kind == "all_to_all" else node.intra.efficiency
        return weakest_provenance(share, node.intra.latency_s, *(link.bandwidth_bytes_per_s for link in node.shared))
    least = _least(*(provenance_of_curve(curve) for curve in measured.values()))
    return _least("extrapolated", least) if ranks > max(measured) and kind != "send_recv" else least
