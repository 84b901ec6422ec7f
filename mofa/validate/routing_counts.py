"""The tokens that experts of a measured run were sent, as its record counts them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from mofa.errors import SpecError
from mofa.measure.records import DRAWN, RunRecord
from mofa.routing.counts import read_counts
from mofa.specs.files import shown_value
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.routing import RoutingSpec
from mofa.specs.run import RunSpec
from mofa.specs.run_files import resolve_run


def with_routing_counts(record: RunRecord, scratch: Path) -> RunSpec:
    """The run with the routing that its routers chose, as a file of counts; without counts as it is, and with experts
    padded to a capacity, which get that many rows whatever the routers chose."""
    if record.measured.tokens_per_expert is None or record.run.routing.pad_to_capacity:
        return record.run
    path = scratch / f"{record.run.id}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("iteration", "layer", "expert", "tokens", "source_rank"))
        try:
            writer.writerows(_counted(record))
        except SpecError:  # of the run itself
            raise
        except (ValueError, IndexError, TypeError, KeyError, OverflowError):
            raise SpecError(
                f"record {record.run.id}: measured.tokens_per_expert and measured.facts.layers do not name layers of "
                "this model, rank by rank; measure the run again"
            ) from None
    try:
        read_counts(path, resolve_run(record.run)[0].model)
    except SpecError as error:  # the file is mofa's own
        what = str(error).removeprefix(f"routing.file {shown_value(str(path), 200)}: ").rpartition(";")[0]
        raise SpecError(f"record {record.run.id}: measured.tokens_per_expert: {what}; measure the run again") from None
    routing = spec_from_mapping(
        RoutingSpec,
        {
            "kind": "counts",
            "file": str(path),
            "memory_quantile": record.run.routing.memory_quantile,
            "steps_before": _steps_before(record),
            "drifts": record.measured.facts.get("routed") != DRAWN,
        },
        f"run {record.run.id}",
    )
    return record.run.model_copy(update={"routing": routing})


def _steps_before(record: RunRecord) -> int:
    """Steps of a run before the middle one of those that were measured; a record may say which one it counted."""
    counted: int | None = record.measured.facts.get("counted_step")
    if counted is not None:
        return counted
    return len(record.measured.warmup_times_s) + len(record.measured.step_times_s) // 2


def _counted(record: RunRecord) -> Iterator[tuple[int, int, int, int, int]]:
    """Rows of the counts: iteration, layer of the model, expert, tokens, rank."""
    model = resolve_run(record.run)[0].model
    layer_names = record.measured.facts.get("layers")
    for rank, layers in enumerate(record.measured.tokens_per_expert or ()):
        own = (
            range(model.num_layers)
            if layer_names is None or layer_names[rank] is None
            else [int(name) for chunk in layer_names[rank] for name in chunk]
        )
        moe = [layer for layer in own if model.is_moe_layer(layer)]
        for layer, experts in zip(moe, layers, strict=True):
            for expert, tokens in enumerate(experts):
                yield 0, layer, expert, tokens, rank
