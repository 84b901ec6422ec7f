"""``mofa show``: what is bundled, and every number of a workload or of hardware with where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mofa.cli import options as opt
from mofa.cli.command_groups import UncutCommandList

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mofa.specs.model_states import ModelPartStates

show = typer.Typer(
    cls=UncutCommandList,
    help="Show what is bundled and what can be written: every fact, field and value.",
    rich_markup_mode=None,
    add_completion=False,
)

PART_COLUMNS_LEAVE = ("fp32 gradients", "bf16 weights", "parameters each", "recurrent state", "optimizer states")
"""What a narrow terminal leaves out of the table of kinds of layers, first things first."""
Name = Annotated[str, typer.Argument(help="A bundled name or a file.")]


@show.command("models")
def show_models(json: opt.Json = False) -> None:
    """List the bundled workloads."""
    from mofa.plan.summaries import WorkloadSummary
    from mofa.specs.load import bundled_names, load_workload
    from mofa.units import format_count

    workloads = [(name, load_workload(name)) for name in bundled_names("workloads")]
    summaries = [(name, WorkloadSummary.from_spec(workload), workload.source) for name, workload in workloads]
    if json:
        _print_json([{**summary.model_dump(), "name": name, "source": source} for name, summary, source in summaries])
        return
    columns = [("name", "left"), ("parameters", "right"), ("active", "right"), ("layers", "right"),
               ("sequence", "right"), ("global batch", "right"), ("tokens", "right"), ("source", "left")]  # fmt: skip
    rows = [
        [
            name, format_count(s.num_params), format_count(s.num_active_params), str(s.num_layers), f"{s.seq_len:,}",
            f"{s.global_batch:,}", format_count(s.tokens) if s.tokens else "", source,
        ]
        for name, s, source in summaries
    ]  # fmt: skip
    _print_table("Bundled workloads", columns, rows, ("layers", "global batch", "sequence"), under="source")


@show.command("hardware")
def show_hardware(name: Annotated[str | None, typer.Argument(help="A node type or a GPU.")] = None,
                  json: opt.Json = False) -> None:  # fmt: skip
    """List the bundled hardware, or show every number of one with its provenance and source."""
    if name is None:
        _list_hardware(json)
    else:
        _show_hardware(name, json)


@show.command("gpus")
def show_gpus(name: Annotated[str | None, typer.Argument(help="A GPU.")] = None, json: opt.Json = False) -> None:
    """List the bundled GPUs, or show every number of one with its provenance and source."""
    if name is None:
        _list_gpus(json)
    else:
        _show_hardware(name, json)


@show.command("faults")
def show_faults(name: Annotated[str | None, typer.Argument(help="A fault profile.")] = None,
                json: opt.Json = False) -> None:  # fmt: skip
    """List the bundled fault profiles, or show every number of one with its provenance and source."""
    from mofa.specs.load import bundled_names, load_faults

    if name is not None:
        facts = load_faults(name).model_dump(mode="json", exclude_none=True)
        if json:
            _print_json(facts)
            return
        _print_table(name, [("field", "left"), ("value", "left")], [[path, str(v)] for path, v in _leaves(facts)])
        return
    profiles = [load_faults(name) for name in bundled_names("fault_profiles")]
    if json:
        _print_json([{"name": spec.name, "source": spec.source} for spec in profiles])
        return
    rows = []
    for spec in profiles:
        rate = spec.reliability.failures_per_node_day if spec.reliability else None
        rows.append([spec.name, "" if rate is None else f"{1000 * rate.value:.2f}", spec.source])
    columns = [("name", "left"), ("failures per 1000 node-days", "right"), ("source", "left")]
    _print_table("Bundled fault profiles", columns, rows, under="source")


@show.command("frameworks")
def show_frameworks(name: Annotated[str | None, typer.Argument(help="A framework.")] = None,
                    json: opt.Json = False) -> None:  # fmt: skip
    """List the frameworks, or every option of one with its values and its default."""
    from mofa.cli.choice_tables import framework_option_rows, framework_rows

    if name is None:
        _list_records("Frameworks", framework_rows(), json, under="source")
    else:
        _list_records(f"Options of {name}: --set framework.OPTION=VALUE", framework_option_rows(name), json)


@show.command("strategy")
def show_strategy(json: opt.Json = False) -> None:
    """List every field of a strategy, as --strategy, --fix and --max read it, with its values and its default."""
    from mofa.cli.choice_tables import strategy_field_rows

    _list_records("Fields of a strategy", strategy_field_rows(), json, under="meaning")


@show.command("schedules")
def show_schedules(json: opt.Json = False) -> None:
    """List the pipeline schedules: who runs them, and when a search tries them."""
    from mofa.cli.choice_tables import schedule_rows

    _list_records("Pipeline schedules", schedule_rows(), json, under="meaning")


@show.command("workload")
def show_workload(
    name: opt.Workload,
    seq_len: opt.SeqLen = None,
    global_batch: opt.GlobalBatch = None,
    tokens: opt.Tokens = None,
    set_: opt.Set = None,
    json: opt.Json = False,
) -> None:
    """Show every field of a workload, and its parameters, counted; layers of several kinds kind by kind."""
    from mofa.cli.jobs import read_workload
    from mofa.cli.parse import parse_overrides
    from mofa.specs.model_states import model_states
    from mofa.specs.params import (
        num_active_params,
        num_active_params_without_embedding,
        num_mtp_params,
        num_params,
    )

    workload = read_workload(name, parse_overrides(set_), seq_len=seq_len, global_batch=global_batch, tokens=tokens)
    counted = {
        "num_params": num_params(workload.model),
        "num_active_params": num_active_params(workload.model),
        "num_active_params_without_embedding": num_active_params_without_embedding(workload.model),
        "num_mtp_params": num_mtp_params(workload.model),
    }
    parts = model_states(workload)
    by_part = {"parts": [part.model_dump() for part in parts]} if parts else {}
    if json:
        _print_json({**workload.model_dump(mode="json"), **counted, **by_part})
        return
    facts = workload.model_dump(mode="json")
    notes = facts.pop("notes") or []
    rows = [[path, _text(value)] for path, value in _leaves(facts)]
    rows += [["note", note] for note in notes]
    rows += [[field, f"{count:,}"] for field, count in counted.items()]
    _print_table(workload.name, [("field", "left"), ("value", "left")], rows)
    if parts:
        _print_parts(parts)


def _print_parts(parts: Sequence[ModelPartStates]) -> None:
    """A table of what each kind of layer holds, of all ranks together."""
    from mofa.report.phrases import quantity_text

    columns = [("kind", "left"), ("of", "left"), ("layers", "right"), ("parameters each", "right"),
               ("parameters", "right"), ("bf16 weights", "right"), ("fp32 gradients", "right"),
               ("optimizer states", "right"), ("recurrent state", "right")]  # fmt: skip
    rows = [
        [
            p.name, p.contents, str(p.layers), f"{p.params:,}", f"{p.total_params:,}",
            *(quantity_text(size, "B") for size in (p.weight_bytes, p.gradient_bytes, p.optimizer_bytes)),
            quantity_text(p.recurrent_state_bytes, "B") if p.recurrent_state_bytes else "",
        ]
        for p in parts
    ]  # fmt: skip
    _print_table("By kind of layer, of all ranks; recurrent states of one layer and sequence, in fp32", columns, rows,
                 PART_COLUMNS_LEAVE, under="of")  # fmt: skip


@show.command("routing")
def show_routing(
    workload: opt.Workload,
    ep: Annotated[int, typer.Option("--ep", help="Expert-parallel degree: ranks of so many.")],
    routing: opt.Routing = None,
    trace: opt.Trace = None,
    iterations: Annotated[int | None, typer.Option("--iterations", help="How many; all of a trace.")] = None,
    set_: opt.Set = None,
    json: opt.Json = False,
) -> None:
    """Show how uneven a routing load is, by layer, iteration and rank, and which distribution is nearest."""
    from mofa.cli.parse import parse_overrides
    from mofa.cli.routing import workload_with_routing
    from mofa.search.experts.routing_report import describe_routing
    from mofa.specs.load import load_workload

    job = load_workload(workload, overrides=parse_overrides(set_)["workload"] or None)
    report = describe_routing(workload_with_routing(job, routing, trace), ep, iterations)
    if json:
        _print_json(report.model_dump(mode="json"))
        return
    heads = ("of", "max/mean", "largest", "smallest", "MaxVio", *(f"p{float(q):.1%}" for q in report.ranks.quantiles))
    groups = [("experts", report.experts), ("ranks", report.ranks)]
    groups += [(f"ranks, layer {g.group}", g) for g in report.by_layer]
    rows = [
        [name, *(f"{x:.3f}" for x in (g.max_over_mean, g.largest, g.smallest, g.max_violation, *g.quantiles.values()))]
        for name, g in groups
    ]
    title = f"{report.workload}: {report.routing}, ep {report.ep}, {report.iterations} iterations; loads over the mean"
    _print_table(title, [(h, "right" if i else "left") for i, h in enumerate(heads)], rows)
    fits = [[f.routing, f"{f.distance:.4f}", f"{f.max_over_mean:.3f}", f"{f.given_max_over_mean:.3f}"]
            for f in report.fits]  # fmt: skip
    _print_table("Nearest distributions", [("routing", "left"), ("distance", "right"), ("max/mean", "right"),
                                           ("the load's", "right")], fits)  # fmt: skip
    bounds = [[f"{c.factor:g}", f"{c.dropped_fraction:.1%}", f"{c.rerun_fraction:.1%}"] for c in report.capacity]
    _print_table("Bounds on the load", [("capacity factor", "left"), ("copies dropped", "right"),
                                        ("micro-batches run twice under a rank budget", "right")], bounds)  # fmt: skip


def _list_records(title: str, records: Sequence[dict[str, Any]], json: bool, under: str = "") -> None:
    """Records as a table, or as JSON."""
    if json:
        _print_json(list(records))
        return
    columns = [(name.replace("_", " "), "left") for name in records[0]]
    rows = [[", ".join(v) if isinstance(v, list) else str(v) for v in record.values()] for record in records]
    _print_table(title, columns, rows, under=under)


def _list_hardware(json: bool) -> None:
    from mofa.report.phrases import quantity_text
    from mofa.specs.load import bundled_names, load_cluster

    clusters = [load_cluster(name, 1) for name in bundled_names("nodes")]
    records: list[dict[str, Any]] = [
        {
            "name": c.node.name,
            "gpu": c.gpu.name,
            "gpus_per_node": c.node.gpus_per_node,
            "gpus_per_domain": c.node.gpus_per_domain,
            "peak_bf16_flops_per_s": c.gpu.peak_flops_per_s["bf16"].value,
            "memory_bytes": c.gpu.memory_bytes.value,
            "capacity_bytes": c.gpu.capacity_bytes.value,
            "intra_bytes_per_s": c.node.intra.bandwidth_bytes_per_s.value,
            "nic_bytes_per_s_per_gpu": c.nic_bandwidth_per_gpu_bytes_per_s,
        }
        for c in clusters
    ]
    if json:
        _print_json({"nodes": records, "gpus": list(bundled_names("gpus"))})
        return
    units = {"peak_bf16_flops_per_s": "FLOP/s", "memory_bytes": "B", "capacity_bytes": "B",
             "intra_bytes_per_s": "B/s", "nic_bytes_per_s_per_gpu": "B/s"}  # fmt: skip
    headings = ("node", "GPU", "a node", "a domain", "bf16 peak", "memory", "capacity", "link a GPU", "NICs a GPU")
    rows = [[str(v) if k not in units else quantity_text(v, units[k]) for k, v in r.items()] for r in records]
    columns = [(heading, "left" if i < 2 else "right") for i, heading in enumerate(headings)]
    _print_table(
        "Bundled nodes (bandwidths per direction)", columns, rows, ("capacity", "a domain", "GPU", "link a GPU")
    )
    _list_gpus(json=False)


def _list_gpus(json: bool) -> None:
    from mofa.report.phrases import quantity_text
    from mofa.specs.files import gpus_of_nodes
    from mofa.specs.load import bundled_names
    from mofa.specs.profiles import load_gpu

    nodes = gpus_of_nodes()
    records: list[dict[str, Any]] = [
        {
            "name": name,
            "peak_bf16_flops_per_s": gpu.peak_flops_per_s["bf16"].value,
            "peak_fp8_flops_per_s": gpu.peak_flops_per_s["fp8"].value if "fp8" in gpu.peak_flops_per_s else None,
            "memory_bytes": gpu.memory_bytes.value,
            "memory_bandwidth_bytes_per_s": gpu.memory_bandwidth_bytes_per_s.value,
            "nodes": sorted(node for node, of_node in nodes.items() if of_node == name),
        }
        for name in bundled_names("gpus")
        for gpu in (load_gpu(name),)
    ]
    if json:
        _print_json(records)
        return
    units = {"peak_bf16_flops_per_s": "FLOP/s", "peak_fp8_flops_per_s": "FLOP/s", "memory_bytes": "B",
             "memory_bandwidth_bytes_per_s": "B/s"}  # fmt: skip
    rows = [
        [
            r["name"],
            *("" if r[key] is None else quantity_text(r[key], unit) for key, unit in units.items()),
            ", ".join(r["nodes"]),
        ]
        for r in records
    ]
    headings = ("GPU", "bf16 peak", "fp8 peak", "memory", "bandwidth", "nodes")
    columns = [(heading, "right" if 1 <= i <= len(units) else "left") for i, heading in enumerate(headings)]
    _print_table("Bundled GPUs", columns, rows, ("fp8 peak", "nodes"))


def _show_hardware(name: str, json: bool) -> None:
    from mofa.report.phrases import quantity_text, unit_of_field
    from mofa.specs.base import Fact
    from mofa.specs.curves import FittedCurve
    from mofa.specs.load import bundled_names, load_cluster
    from mofa.specs.profiles import is_gpu_file, load_gpu

    specs: dict[str, BaseModel]
    is_gpu = name in bundled_names("gpus") or is_gpu_file(name)
    if is_gpu and name not in bundled_names("nodes"):
        specs = {"gpu": load_gpu(name)}
    else:
        cluster = load_cluster(name, 1)
        specs = {"node": cluster.node, "gpu": cluster.gpu}
    if json:
        _print_json({key: spec.model_dump(mode="json") for key, spec in specs.items()})
        return
    for key, spec in specs.items():
        rows = []
        for path, value in _facts(spec, key):  # as --set hardware.PATH has it
            if isinstance(value, FittedCurve):
                error = f", median error {value.median_abs_error:.1%}" if value.median_abs_error is not None else ""
                fitted = f"{value.points} points{error}" if value.points else "a fitted form"
                rows.append([path, fitted, value.provenance, value.source])
            elif isinstance(value, Fact):
                rows.append(
                    [path, quantity_text(value.value, unit_of_field(_named(path))), value.provenance, value.source]
                )
            else:
                rows.append([path, _text(value), "", _NO_FACTS.get(path, "")])
        columns = [("field", "left"), ("value", "right"), ("provenance", "left"), ("source", "left")]
        _print_table(str(getattr(spec, "name", name)), columns, rows, ("provenance",), under="source")


_NO_FACTS = {"node.nic.protocol": "a name: moves no prediction, nic.efficiency and nic.latency_s do"}
"""What is no fact and may be taken for one, by its path."""


def _named(path: str) -> str:
    """The part of a path that says the unit; a table of rates per format says it one level higher."""
    return next((part for part in reversed(path.split(".")) if part not in ("bf16", "fp8", "fp32")), path)


def _facts(spec: BaseModel, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a spec with their dotted paths; a Fact is a leaf, and a fitted curve."""
    from pydantic import BaseModel

    from mofa.specs.base import Fact
    from mofa.specs.curves import FittedCurve

    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, BaseModel) and not isinstance(value, Fact | FittedCurve):
            yield from _facts(value, path)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, f"{path}.{key}")
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for i, item in enumerate(value):
                yield from walk(item, f"{path}[{i}]")
        else:
            yield path, value

    for field in type(spec).model_fields:
        yield from walk(getattr(spec, field), f"{path}.{field}" if path else field)


def _leaves(raw: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings, and of those in lists, with their dotted paths, without absent ones."""
    for key, value in raw.items():
        key_path = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _leaves(value, key_path)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, item in enumerate(value):
                yield from _leaves(item, f"{key_path}[{i}]")
        elif value is not None:
            yield key_path, value


def _text(value: object) -> str:
    """A value on one line, as YAML writes it; of a long list how often each item stands in a row.

    Examples
    --------
    >>> [_text(value) for value in (True, None, (), 1.48e13, 0.5, "bf16")]
    ['true', 'none', 'none', '14,800,000,000,000', '0.5', 'bf16']
    """
    from itertools import groupby

    if value is None or (isinstance(value, list | tuple | dict) and not value):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and value >= 1e6:
        return f"{value:,.0f}"
    if not isinstance(value, list) or len(value) < 5 or not all(isinstance(item, str) for item in value):
        return str(value)
    runs = [(item, len(list(same))) for item, same in groupby(value)]
    return ", ".join(f"{length} x {item}" if length > 1 else item for item, length in runs)


def _print_json(value: object) -> None:
    import json
    import sys

    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def _print_table(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    leaves: Sequence[str] = (),
    under: str = "",
) -> None:
    from mofa.report.tables import make_console, print_table

    print_table(make_console(), title, columns, rows, leaves=leaves, under=under)
