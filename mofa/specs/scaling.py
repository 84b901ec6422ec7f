"""The curves of one GPU taken over for another, by the ratios of their datasheets: transferred or assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite, log2
from typing import Any

from mofa.specs.hardware import ClusterSpec
from mofa.specs.host import layer_time_factors_by_fact
from mofa.specs.products import FALLBACK, known_or_stand_in_format
from mofa.units import GIB, parse_quantity

RATES = ("small_rate", "large_rate")
COMPUTE = ("gemm", "grouped_gemm")
SHORTEST_S = 1e-7
"""Start of a collective that a shorter latency would leave nothing of. [s]"""
LEAST_SCALED, MOST_SCALED = 1e-30, 1e33
"""Of a fact that curves are scaled to; beyond, its own check refuses it. SI"""
BESIDE_COMMUNICATION = ("overlap_slowdown", "slowdown_by_held_multiprocessors")
"""What computing loses beside communication."""
OF_CHIPS = ("chip_spread", "step_jitter")
"""How far chips of one kind, and steps of one chip, are apart; other processors' differ."""
UNSCALED = (
    "host", "hosts", "stream_clock", "power_limit", *OF_CHIPS, "host_spread", "host_swing",
    *BESIDE_COMMUNICATION,
)  # fmt: skip
"""What of curves no fact of a datasheet scales."""
OF_LIBRARIES = ("unaligned_products", "optimizer_16_bit", "kernel_selection", "layer_kernels")
"""Facts of kernels that libraries choose by the processor (:mod:`mofa.specs.gpu_facts`)."""
FIT_FIELDS = ("points", "median_abs_error", "p90_abs_error", "ranges")
"""What holds of a fit on one processor and format alone."""


def scaled_memory_bound_bytes_per_s(
    bytes_per_s: float, copy_bytes_per_s: float, bandwidth: float, issue: float
) -> float:
    """Rate of a memory-bound kernel on a GPU whose memory is ``bandwidth`` times as fast and whose multiprocessors
    together issue ``issue`` times as much.

    A kernel that moves bytes as fast as a copy is bound by the memory. A slower one is bound by what it issues as well;
    the two times add up as the legs of a right triangle. On one processor with two memories (H200 and H100, 4.8 and
    3.35 TB/s; all rows from 20 us in measurements/h200-1gpu, h100-1gpu and the routed ones of both) the first's curves
    then predict the second's kernels with a median error of 3.9 % (90th percentile 14 %, bias 0.9 %) where bandwidth
    alone gives 11 % (32 %, 11 %). A plain sum gives 6.2, the slower of both 6.6 %; exponents from 2 to 3 are as good.
    Kernels that read out of the L2 are bound by neither and carried over too slow (gathers of few rows, 27 %). [B/s]

    Parameters
    ----------
    bytes_per_s, copy_bytes_per_s
        Of the kernel and of a copy, on the GPU where they were measured. [B/s]
    bandwidth, issue
        Over that GPU's. [-]

    Examples
    --------
    >>> [round(scaled_memory_bound_bytes_per_s(rate, 4e12, 0.5, 1.0) / 1e12, 3) for rate in (4e12, 1e12)]
    [2.0, 0.918]
    """
    if bytes_per_s >= copy_bytes_per_s or bandwidth == issue:
        return bytes_per_s * bandwidth
    issued = bytes_per_s**-2 - copy_bytes_per_s**-2
    return float(((copy_bytes_per_s * bandwidth) ** -2 + issued / issue**2) ** -0.5)


def scaled_clock_share(share: float, faster: float, issue: float) -> float:
    """Share of a memory-bound kernel's time that grows as the clock falls, where the kernel is so many times as fast.

    What multiprocessors issue takes as long as before over ``issue``, theirs over those before. [-]

    Examples
    --------
    >>> scaled_clock_share(0.4, 1.5, 1.0)
    0.6
    """
    return _digits(min(share * faster / issue, 1.0))


def scaled_curve(curve: dict[str, Any], rate: float, bandwidth: float, sms: float) -> dict[str, Any]:
    """A curve whose computing is ``rate`` times as fast, whose bytes move ``bandwidth`` times as fast, on ``sms`` times
    as many multiprocessors; floors and what a row or an expert costs stay.

    Examples
    --------
    >>> form = {"tiles": [[128, 128, 8e14]], "bytes_per_s": 4e12, "floor_s": 3e-6}
    >>> scaled_curve({"form": form}, 0.5, 0.75, 1.0)["form"]
    {'tiles': [[128, 128, 400000000000000.0]], 'bytes_per_s': 3000000000000.0, 'floor_s': 3e-06}
    """
    form = dict(curve["form"])
    if "tiles" in form:
        form["tiles"] = [[rows, columns, _digits(value * rate)] for rows, columns, value in form["tiles"]]
    for name in RATES:
        if name in form:
            form[name] = _digits(form[name] * rate)
    if "unit_s" in form:
        slots = form["slots"] * sms
        form["unit_s"] = _digits(form["unit_s"] * sms / rate / min(slots, 1.0))  # one slot runs all that less would
        form["slots"] = max(1, round(slots))
    for name in ("bytes_per_s", "missed_bytes_per_s", "added_bytes_per_s"):
        if name in form:
            form[name] = _digits(form[name] * bandwidth)
    made = {**curve, "form": form}
    if "full_load_flops" in curve:
        made["full_load_flops"] = _digits(curve["full_load_flops"] * rate)
    return made


def gpu_curves_transferred_to_other(
    curves: dict[str, Any], *, rates: dict[str, float], bandwidth: float, sms: float, clock: float = 1.0,
    provenance: str, source: str, exact: bool,
) -> dict[str, Any]:  # fmt: skip
    """All curves of a GPU for another one.

    Parameters
    ----------
    rates
        Peak rate of each format over the measured GPU's; formats that are not in it are dropped. [-]
    bandwidth, sms, clock
        Memory bandwidth, multiprocessors and their highest clock over the measured GPU's. [-]
    provenance, source
        What is said of every curve.
    exact
        Whether it is the same processor, so that fit errors and ranges still hold.
    """

    def said(curve: dict[str, Any], rate: float) -> dict[str, Any]:
        made = {**scaled_curve(curve, rate, bandwidth, sms), "source": source}
        made["provenance"] = curve["provenance"] if curve["provenance"] == "assumed" else provenance
        if not exact:
            made = {k: v for k, v in made.items() if k not in FIT_FIELDS}
        return made

    rates = rates | {
        kind: rates[known] for kind in FALLBACK if (known := known_or_stand_in_format(kind, rates)) in rates
    }
    made: dict[str, Any] = {
        family: {f: said(curve, rates[f]) for f, curve in curves[family].items() if f in rates} for family in COMPUTE
    }
    if "multi_stream" in curves:
        measured = {f: said(curve, rates[f]) for f, curve in curves["multi_stream"].items() if f in rates}
        made["multi_stream"] = measured
    made["attention"] = {key: said(curve, rates["bf16"]) for key, curve in curves["attention"].items()}
    copy = curves["stream"].get("eager copy", curves["stream"]["default"])["form"]["bytes_per_s"]

    def moved(curve: dict[str, Any]) -> dict[str, Any]:
        known = said(curve, 1.0)
        measured = scaled_memory_bound_bytes_per_s(curve["form"]["bytes_per_s"], copy, bandwidth, sms * clock)
        made = {**known, "form": {**known["form"], "bytes_per_s": _digits(measured)}}
        if not exact:
            made.pop("draw", None)  # another processor has another limit
        if curve.get("clock_share"):
            made["clock_share"] = scaled_clock_share(
                curve["clock_share"], measured / curve["form"]["bytes_per_s"], sms * clock
            )
        return made

    made["stream"] = {key: moved(curve) for key, curve in curves["stream"].items()}
    if curves.get("releases"):
        made["releases"] = {
            number: {
                "gemm": {f: said(curve, rates[f]) for f, curve in own.get("gemm", {}).items() if f in rates},
                "stream": {key: moved(curve) for key, curve in own.get("stream", {}).items()},
            }
            for number, own in curves["releases"].items()
        }
    made["host"] = {key: _restated(fact, source) for key, fact in curves["host"].items()}
    if curves.get("hosts"):
        made["hosts"] = {key: _restated(fact, source) for key, fact in curves["hosts"].items()}
    if curves.get("power_limit"):
        made["power_limit"] = {key: _restated(fact, source) for key, fact in curves["power_limit"].items()}
    for name in ("stream_clock", *OF_CHIPS, "host_spread", "host_swing", *BESIDE_COMMUNICATION):
        if curves.get(name) is not None and (exact or name not in OF_CHIPS):
            made[name] = _restated(curves[name], source)
    if exact:  # another processor takes what is assumed of all
        made |= {name: _restated(curves[name], source) for name in OF_LIBRARIES if name in curves}
    return made


def slowed_host(
    host: Mapping[str, Any], factor: float, words: str, by_name: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """A host's mapping with every time ``factor`` as long, or as ``by_name`` says of its name. [-]

    As :meth:`mofa.specs.host.HostIssueTimes.scaled_to_speed`, on the values of a file; a fact that is no quantity is
    left for the check. ``words`` say why.
    """

    def slowed(name: str, fact: Any) -> Any:
        if isinstance(fact, Mapping) and "value" not in fact:  # facts below facts: those of modules
            return {key: slowed(key, item) for key, item in fact.items()}
        times = (by_name or {}).get(name, factor)
        try:
            value = f"{parse_quantity(fact['value'], 's') * times * 1e6:.6g} us"
            return {**fact, "value": value, "source": f"{fact['source']}; {times:.3g} times as long: {words}"}
        except (KeyError, TypeError, ValueError):
            return fact

    return {key: slowed(key, fact) for key, fact in host.items()}


def _restated(fact: Any, source: str) -> Any:
    if not isinstance(fact, dict):
        return fact
    if "value" not in fact:  # facts below facts: those of modules
        return {key: _restated(item, source) for key, item in fact.items()}
    return {**fact, "provenance": "transferred", "source": source}


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def rescaled_host(gpu: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """A GPU's mapping whose host is as fast as the user says: with ``eager_op_s`` every time that was not set too.

    With ``layer_issue_s`` and ``layer_back_s`` the calls of modules go, each way by its own. Such a host stands for no
    typical one any more.
    """
    curves, known = gpu.get("curves"), before.get("curves")
    if not isinstance(curves, dict) or not isinstance(known, dict):
        return dict(gpu)
    host, own = curves.get("host"), known.get("host")
    if not isinstance(host, dict) or not isinstance(own, dict) or host == own:
        return dict(gpu)
    pairs = [_both(host, own, (name,), "s") for name in ("eager_op_s", "layer_issue_s", "layer_back_s")]
    factor, ahead, back = (new / old if new > 0 and old > 0 else 1.0 for new, old in pairs)
    by_name = layer_time_factors_by_fact(factor if ahead == 1.0 else ahead, factor if back == 1.0 else back)
    if any(share != 1.0 for share in (factor, *by_name.values())):
        said = "as eager_op_s, layer_issue_s and layer_back_s, set by the user"
        host = _unless_set(host, own, slowed_host(own, factor, said, by_name))
    return {**gpu, "curves": {**{key: item for key, item in curves.items() if key != "hosts"}, "host": host}}


def _unless_set(host: Mapping[str, Any], own: Mapping[str, Any], scaled: Mapping[str, Any]) -> dict[str, Any]:
    """Scaled facts where a host has its profile's own, at any depth, and else what was set."""

    def chosen(key: str, fact: Any) -> Any:
        if key not in own:
            return fact
        if fact == own[key]:
            return scaled[key]
        nested = isinstance(fact, dict) and isinstance(own[key], dict) and "value" not in own[key]
        return _unless_set(fact, own[key], scaled[key]) if nested else fact

    return {key: chosen(key, fact) for key, fact in host.items()}


def _device(curves: Mapping[str, Any]) -> dict[str, Any]:
    """What of curves is the GPU's own: a host is no fact of its datasheet."""
    return {key: item for key, item in curves.items() if key not in ("host", "hosts")}


def with_rescaled_capacity(cluster: ClusterSpec, before: ClusterSpec) -> ClusterSpec:
    """A cluster whose GPU's memory the user changed, with the share of it before that the driver left."""
    ratio = cluster.gpu.memory_bytes.value / before.gpu.memory_bytes.value
    capacity = before.gpu.capacity_bytes.model_copy(
        update={
            "value": before.gpu.capacity_bytes.value * ratio,
            "provenance": "assumed",
            "source": "set by the user: scaled with memory_bytes",
        }
    )
    return cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"capacity_bytes": capacity})})


def capacity_scaled_with_memory(gpu: Mapping[str, Any], before: Mapping[str, Any], like: str) -> dict[str, Any]:
    """A GPU's capacity where its file says another memory alone: the share of it that the driver leaves of ``like``.

    Empty where the memory is the same, or no quantity, which the check refuses.

    Examples
    --------
    >>> def memory(text): return {"value": text, "provenance": "datasheet", "source": "x"}
    >>> before = {"memory_bytes": memory("80 GiB"), "capacity_bytes": memory("79 GiB")}
    >>> twice = {**before, "memory_bytes": memory("160 GiB")}
    >>> capacity_scaled_with_memory(twice, before, "x")["capacity_bytes"]["value"]
    '158 GiB'
    """
    new, old = _both(gpu, before, ("memory_bytes",), "B")
    if new == old:
        return {}
    capacity = parse_quantity(before["capacity_bytes"]["value"], "B")
    value = f"{capacity * new / old / GIB:.6g} GiB"
    return {
        "capacity_bytes": {"value": value, "provenance": "assumed", "source": f"{like}'s, scaled with memory_bytes"}
    }


def rescaled_gpu(gpu: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """A GPU's mapping with its curves scaled to datasheet facts that the user changed: rates, bandwidth, processors.

    What the curves were before the change is said to be assumed; a fact that is no quantity is left for the check.
    """

    def ratio(*path: str, unit: str) -> float:
        new, old = _both(gpu, before, path, unit)
        return new / old if new > 0 and old > 0 else 1.0

    curves, formats = gpu.get("curves"), gpu.get("peak_flops_per_s")
    known = before.get("curves")
    if not isinstance(curves, dict) or not isinstance(known, dict) or not isinstance(formats, Mapping):
        return dict(gpu)
    if _device(curves) != _device(known):
        return dict(gpu)
    rates = {f: ratio("peak_flops_per_s", f, unit="FLOP/s") for f in formats}
    bandwidth = ratio("memory_bandwidth_bytes_per_s", unit="B/s")
    sms = ratio("num_sms", unit="")
    if bandwidth == sms == 1.0 and all(rate == 1.0 for rate in rates.values()):
        return dict(gpu)
    words = f"set by the user: curves of {before.get('name')} by the ratios of rate, bandwidth and multiprocessors"
    scaled = gpu_curves_transferred_to_other(
        curves, rates=rates, bandwidth=bandwidth, sms=sms, provenance="assumed", source=words, exact=False
    )
    unchanged = {name: curves[name] for name in UNSCALED if name in curves}
    return {**gpu, "curves": {**scaled, **unchanged}}


def rescaled_node(node: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """A node's mapping with its measured collectives scaled to facts of the fast link that the user changed.

    Rates go with what the link carries after its efficiency (all-to-alls have their own), starts grow by what the
    collective's own start and its steps of latency do (:mod:`mofa.cost.kernels.collectives`). What comes out is
    assumed.
    """
    curves = node.get("collectives")
    if not isinstance(curves, dict) or not curves or curves != before.get("collectives"):
        return dict(node)

    def pair(*path: str, unit: str = "") -> tuple[float, float]:
        return _both(node, before, path, unit)

    def ratio(efficiency: str) -> float:
        new, old = (
            bandwidth * share
            for bandwidth, share in zip(
                pair("intra", "bandwidth_bytes_per_s", unit="B/s"), pair("intra", efficiency), strict=True
            )
        )
        return new / old if new > 0 and old > 0 else 1.0

    rings, all_to_all = ratio("efficiency"), ratio("all_to_all_efficiency")
    (new, old), (started, start) = pair("intra", "latency_s", unit="s"), pair("collective_startup_s", unit="s")
    step_s, startup_s = new - old, started - start
    if rings == all_to_all == 1.0 and step_s == startup_s == 0.0:
        return dict(node)

    def scaled(key: str, curve: Mapping[str, Any]) -> dict[str, Any]:
        kind, group = key.split()[0], int(curve["form"]["group"])
        rate = all_to_all if kind == "all_to_all" else rings
        steps = {"send_recv": 1, "all_reduce": 2 * ceil(log2(group))}.get(kind, group - 1)
        more_s = startup_s + steps * step_s
        if rate == 1.0 and more_s == 0.0:
            return dict(curve)
        made = [
            [_digits(max(start_s + more_s, SHORTEST_S)), _digits(bytes_per_s * rate)]
            for start_s, bytes_per_s in curve["form"]["protocols"]
        ]
        unchanged = {name: value for name, value in curve.items() if name not in FIT_FIELDS}
        words = f"set by the user: the curve of {before.get('name')} by the changes of its link"
        return {**unchanged, "provenance": "assumed", "source": words, "form": {**curve["form"], "protocols": made}}

    try:
        return {**node, "collectives": {key: scaled(str(key), curve) for key, curve in curves.items()}}
    except (AttributeError, KeyError, TypeError, ValueError):  # no curves: left for the check
        return dict(node)


def _both(new: Mapping[str, Any], old: Mapping[str, Any], path: Sequence[str], unit: str) -> tuple[float, float]:
    """One fact of two mappings as numbers, 1 and 1 where it is no quantity."""
    try:
        for key in path:
            new, old = new[key], old[key]
        given = [fact["value"] if isinstance(fact, Mapping) else fact for fact in (new, old)]
        values = [parse_quantity(fact, unit) if unit else float(fact) for fact in given]
    except (KeyError, TypeError, ValueError, OverflowError):
        return 1.0, 1.0
    if not all(
        isfinite(value) and LEAST_SCALED <= abs(value) <= MOST_SCALED for value in values if value
    ):  # left for the check
        return 1.0, 1.0
    return values[0], values[1]
