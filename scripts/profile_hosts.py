"""Hosts of the bundled profiles: how slow a typical one is, what modules' calls take it, and what a Grace takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mofa.calibrate.fits.layer_segments import (
    LayerSegment,
    latent_attention_time_in_small_ops,
    read_layer_segments,
    unrecorded_over_recorded_time_by_format,
)
from mofa.calibrate.fits.profile import SMALL_OPS
from mofa.calibrate.fits.te_host_facts import module_host_facts, module_times_over_small_layer, small_layer_host_facts
from mofa.calibrate.fits.te_relative_host_times import HostTimesOverSmallLayer
from mofa.calibrate.measurements import read_rows, rows_of_first_folder_with_op
from mofa.measure.records import read_records
from mofa.specs.host import SmallLayerTime
from mofa.specs.scaling import slowed_host
from mofa.units import parse_quantity
from mofa.validate.step_pace import layer_time_over_small_op

ROOT = Path(__file__).resolve().parent.parent
TE_HOST = ("h100-te-host-quiet", "h100-2gpu-te-host-quiet", "h100-2gpu-te-host-layer", "h100-te-host-layer")
"""Folders of the host under Transformer Engine: times over a small layer beside them, which hold for every host. First
those on quiet cores; what they lack is from before cores were chosen."""
SEGMENTS, SEGMENT_ROWS = "h200-layer-segments", "segments.csv"
"""Folder of layers of real steps, timed by parts without a profiler."""
PARTS = (
    ("host-c43e3c", "host-677276", "host-5dbaa1", "host-96bea3", "host-f3f492"),
    ("host-cf13cf", "host-dd816d", "host-9db335", "host-ee3ff8", "host-3dd9de", "host-2ad8f7"),
)
"""Marks of two machines of four GPUs, some of which ran side by side on 27 November 2026."""
GRACE_HOST = 37.08 / 13.48
"""Host time of a forward of torch's Linear on GB200 over an H100 DGX with Xeon 8480C: 37.08 and 13.48 us. [-]"""
GRACE_SOURCE = (
    f"those of hosts/xeon-8480c.yaml times {GRACE_HOST:.3g}: a forward of torch's Linear takes the host 37.08 us on "
    "GB200, 33.17 on GH200 and 13.48 on an H100 DGX with Xeon 8480C (github.com/NVIDIA/TransformerEngine issue 2053)"
)


def si(fact: dict[str, Any], unit: str) -> float:
    """A fact's value."""
    return parse_quantity(fact["value"], unit)


def machines() -> dict[str, float]:
    """Issue of a small op on every machine that timed it: the median of its calibrations and its H200 runs. [s]

    Of runs the fitting half alone counts, although it is nothing that is predicted.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for folder in sorted((ROOT / "measurements").iterdir()):
        rows = read_rows(folder, families=["host"]) if (folder / "host.csv").is_file() else []
        if times := [row.sample.median_s for row in rows if row.case.op in SMALL_OPS]:
            found[rows[0].host].append(float(np.median(times)))
    for record in read_records(ROOT / "reference_runs" / "measured"):
        machine = record.environment
        if record.split == "fitting" and "H200" in machine.gpu and machine.host and machine.host_issue_s is not None:
            found[machine.host].append(machine.host_issue_s)
    return {host: float(np.median(values)) for host, values in found.items()}


def with_modules(host: dict[str, Any]) -> dict[str, Any]:
    """``host`` with what calls of modules take it, by the small layer beside which they were timed. That layer takes so
    many small ops, each way, as runs of the fitting half read of both on quiet cores."""
    rows = rows_of_first_folder_with_op([ROOT / "measurements" / name for name in TE_HOST], families=["te_host"])
    records = [one for one in read_records(ROOT / "reference_runs" / "measured") if one.split == "fitting"]
    ahead, back = layer_time_over_small_op(records, PARTS)
    op_s = si(host["eager_op_s"], "s")
    layer = SmallLayerTime(ahead * op_s, back * op_s)
    sample = "the median of machines with runs of the fitting half"
    said = f"{ahead:.3g} small ops forward and {back:.3g} back, on quiet cores: {sample}"
    source = f"measurements/{', '.join(TE_HOST)}: in layers and chains, over the small layer beside them"
    modules = module_host_facts(module_times_over_small_layer(HostTimesOverSmallLayer.from_rows(rows)), layer, source)
    segments = read_layer_segments(ROOT / "measurements" / SEGMENTS / SEGMENT_ROWS)
    modules = with_latent_attention(with_unrecorded_experts(modules, segments), segments, op_s)
    return {**host, **small_layer_host_facts(layer, said), "modules": modules}


Modules = dict[str, dict[str, Any]]
"""Modules' times, as profiles have them."""


def with_latent_attention(modules: Modules, segments: Sequence[LayerSegment], op_s: float) -> Modules:
    """The times with latent attention's as in real steps: its rotations, which are Triton's kernels, and its Python.

    Back the rotations are taken off what a model of it takes beside its other modules.
    """
    ops = latent_attention_time_in_small_ops(segments)
    if ops is None:
        return modules
    source = f"measurements/{SEGMENTS}: mla-dense, over the small op between its steps"

    def fact(seconds: float, source: str = source) -> dict[str, Any]:
        return {"value": f"{seconds * 1e6:.4g} us", "provenance": "measured", "source": source}

    rope_back_s, own = ops.rope_back * op_s, modules["latent_attention"]
    more_s = 2.0 * (rope_back_s - si(modules["rope"]["backward_s"], "s"))
    left = fact(max(si(own["backward_s"], "s") - more_s, 0.0), f"{own['backward_s']['source']}, less its rotations'")
    made = {"forward_s": fact(ops.own * op_s), "backward_s": left}
    turned = {"forward_s": fact(ops.rope * op_s), "backward_s": fact(rope_back_s)}
    return dict(sorted({**modules, "latent_attention": made, "latent_rope": turned}.items()))


def with_unrecorded_experts(modules: Modules, segments: Sequence[LayerSegment]) -> Modules:
    """Grouped linears' times with those of a forward that autograd does not record, by their share in real steps."""
    shares = unrecorded_over_recorded_time_by_format(segments)
    for format_, share in sorted(shares.items()):
        ways = modules["grouped_linear" if format_ == "bf16" else f"grouped_linear {format_}"]
        seconds = share * si(ways["forward_each_s"], "s")
        source = f"{share:.3g} of forward_each_s: measurements/{SEGMENTS}, checkpoints' first passes over repetitions"
        fact = {"value": f"{seconds * 1e6:.4g} us", "provenance": "measured", "source": source}
        ways["forward_each_unrecorded_s"] = fact
    return modules


def typical_host(host: dict[str, Any]) -> dict[str, Any]:
    """``host`` as slow as the middle one of all machines that were timed, and how far they are apart."""
    known = list(machines().values())
    typical, own = float(np.median(known)), si(host["eager_op_s"], "s")
    fast, slow = (float(np.quantile(known, share)) for share in (0.1, 0.9))
    said = f"over {len(known)} machines, each by its calibrations and fitting runs, of what a small op takes"
    made = slowed_host(host, typical / own, f"the median {said}")

    def share(op_s: float, quantile: str) -> dict[str, Any]:
        source = f"{quantile} quantile {said}, {op_s * 1e6:.3g} us, over the median"
        return {"value": round(op_s / typical, 3), "provenance": "measured", "source": source}

    return {"host": made, "hosts": {"fast": share(fast, "10 %"), "slow": share(slow, "90 %")}}


def grace_host(host: dict[str, Any]) -> dict[str, Any]:
    """The host times of a Xeon on a Grace."""

    def slower(fact: dict[str, Any]) -> dict[str, Any]:
        if "value" not in fact:  # facts below facts: those of modules
            return {name: slower(item) for name, item in fact.items()}
        seconds = si(fact, "s") * GRACE_HOST
        return {**fact, "value": f"{seconds * 1e6:.4g} us", "provenance": "transferred", "source": GRACE_SOURCE}

    known = {name: fact for name, fact in host.items() if name != "optimizer"}  # nobody timed one on a Grace
    facts = {name: slower(fact) for name, fact in known.items() if isinstance(fact, dict)}
    return {**facts, "cpu": "NVIDIA Grace"}
