"""Rows of a table of published runs into configurations: which are usable, by rules on their columns alone."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mofa.errors import SpecError
from mofa.measure.records import Split
from mofa.search.one_strategy import checked_strategy_row
from mofa.specs.files import load_yaml
from mofa.specs.framework_traits import TRAITS
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.implied_facts import DEEPSPEED
from mofa.specs.run import RunSpec
from mofa.specs.run_files import resolve_run
from mofa.units import GIB, MIB
from mofa.validate import recipes
from mofa.validate.architecture import (
    Row,
    model_of_row,
    source_of_row,
    whole_number_in_column,
    why_bundled_model_differs,
    why_row_has_no_model,
    with_section_columns,
)
from mofa.validate.contradictions import contradictory_memory_rows, implausible_out_of_memory
from mofa.validate.published import UNUSABLE, PublishedFile, PublishedRun
from mofa.validate.row_gaps import BY_RULE, step_s_by_throughput, with_filled_columns
from mofa.validate.row_groups import group_of_row

FRAMEWORKS = {
    **dict.fromkeys(("bridge", "bridgecard", "nemo", "nemodoc", "nemolauncher", "mlperf", "mcore08", "mlmllama",
                     "simumax"), "megatron"),
    **dict.fromkeys(("korth", "bloom"), "megatron-2022"),
    **dict.fromkeys(("foundry", "fms"), "fsdp1"),
    "titan": "torchtitan",
}  # fmt: skip
"""Framework of the sources whose framework is modelled."""
NODES = {
    "H100": "h100-hgx", "H100 80GB": "h100-hgx", "H200": "h200-hgx", "A100 80GB": "a100-hgx", "B200": "b200-hgx",
    "GB200": "gb200-nvl72", "H800": "h800-hgx", "B300": "b300-hgx", "GB300": "gb300-nvl72",
}  # fmt: skip
POWER_LIMITED = {
    "B200 (power limited)": "b200-hgx",
    "H100 (95 GiB device)": "h100-hgx",
    "H100 94-96GB HBM2e low-TDP": "h100-hgx",
}
"""GPUs whose clocks their profile does not describe: their rows say something of memory alone."""
UNSTATED = {("github:pytorch/ao:", "H100"): "H100 (95 GiB device)"}
"""What a repository's unnamed GPU is: the logs that pytorch/ao prints (titan-062 to titan-064, the same job) come from
an H100 of 95 GiB, which torchtitan's tables list with a limit of 500 W."""
OWN_NODES = {
    "bloom": {"A100 80GB": "hardware/a100-jean-zay.yaml"},
    "fms": {"A100 80GB": "hardware/a100-400gbps.yaml", "H100 80GB": "hardware/h100-800gbps.yaml"},
}
"""Nodes of sources whose network differs from the bundled node's."""
MEMORY = {"simumax": "allocated", "bridgecard": "allocated", "titan": "reserved", "bloom": "device"}
"""What a source's memory column means (published_runs.md, section 4); not scored where it is unstated."""
UNIT = {"bloom": 1000 * MIB}
"""Bytes of a source's unit of memory; GiB elsewhere. The lab book rounds nvidia-smi's MiB to thousands: it has a row at
80 "GB" on a device of 81 251 MiB, 79.3 GiB."""
STATES_VPP = ("bridge", "bridgecard", "nemodoc", "simumax", "bloom", "korth", "titan")
"""Sources in which a blank number of virtual stages means one; ``nemo`` gives it for its 24.07 table."""
RECOMPUTE = {
    "none": "none", "full": "full", "full(uniform,1)": "full", "selective(core attention)": "selective",
    "selective(per-op SAC)": "ops", "selective(every 2nd layer)": "every:2",
}  # fmt: skip
UNMODELLED_OVERLAPS = (
    (r"natural routing", "routing is natural and its loads are not given"),
    (r"offloaded", "offloading is not modelled"),
    (r"Async TP", "asynchronous tensor parallelism is not modelled"),
    (r"float8nocompile", "torchao's float8 without compilation is not modelled"),
)
GATHERS_FP8 = r"(fp8|f8|float8) all-gather"
"""Rows of torchtitan whose weights are gathered in fp8, with the scales of all of them made ahead, as torchtitan's own
document says to (docs/float8.md) and pytorch/ao's script does (benchmarks/float8/training/torchtitan_benchmark.sh)."""
BLOCKING_GPUS = 320
"""From how many GPUs on the lab book's runs hang unless launches block ("always hangs", its section on hanging): its
main script sets CUDA_LAUNCH_BLOCKING=1 ("do not remove or the training will hang"). Below, it isn't known."""
EMBEDDINGS_COUNTED = ("bloom-128", "bloom-129")
"""Rows before those of the BF16 optimizer that the lab book heads "regex partition_method='type:transformer|embed'"."""
JUDGING_ONLY = ("korth",)
"""Sources of which nothing may be learned: end-to-end runs whose layers have been timed apart."""


def _framework(row: Row) -> str | None:
    if source_of_row(row) == "korthlayer":
        return "times of one layer, no step"
    if source_of_row(row) not in FRAMEWORKS:
        return f"framework is not modelled: {row['framework'] or 'not given'}"
    return None


def gpu_of_row(row: Row) -> str:
    """The GPU of a row: its column, unless its repository's logs say which variant that is."""
    where, name = row["source_url_or_repo_path"], row["gpu"]
    return next((own for (start, short), own in UNSTATED.items() if where.startswith(start) and name == short), name)


def _hardware(row: Row) -> str | None:
    if gpu_of_row(row) in NODES or gpu_of_row(row) in POWER_LIMITED:
        return None
    return f"GPU has no profile: {row['gpu'] or 'not given'}"


def product_format_of_row(row: Row) -> str | None:
    """Format of the products; None where it is not modelled. Half precision runs at bf16's rate."""
    text = row["precision"]
    if text in ("bf16", "fp16") or (not text and source_of_row(row) == "bloom"):
        return "bf16"
    if text == "mxfp8":
        return "fp8-mxfp8"
    if not re.match(r"fp8($|[(-])", text):
        return None
    return recipes.fp8_scaling_of_row(row)


def _precision(row: Row) -> str | None:
    format_ = product_format_of_row(row)
    if format_ is None:
        return f"precision is not modelled: {row['precision'] or 'not given'}"
    framework = FRAMEWORKS[source_of_row(row)]
    if format_ != "bf16" and not TRAITS[framework].has_fp8:
        return f"fp8 is not modelled for {framework}"
    if format_ == "fp8-mxfp8" and "mxfp8" not in TRAITS[framework].fp8_recipes:
        return f"precision is not modelled: {row['precision']}"
    return None


def _degrees(row: Row) -> str | None:
    source = source_of_row(row)
    missing = [c for c in ("n_gpus", "tp", "pp", "mbs", "gbs") if not row[c]]
    if row["moe_experts"] and not row["ep"]:
        missing.append("ep")
    given = row["vpp"] or recipes.virtual_stages_of_row(row)
    if row["pp"] not in ("", "1") and not given and source not in STATES_VPP:
        missing.append("vpp")
    if missing:
        return f"configuration is not given: {', '.join(missing)}"
    ranks = [whole_number_in_column(row, c) or 1 for c in ("tp", "pp", "cp", "dp")]
    if row["dp"] and ranks[0] * ranks[1] * ranks[2] * ranks[3] != whole_number_in_column(row, "n_gpus"):
        return "tp x pp x cp x dp is not the number of GPUs"
    if not TRAITS[FRAMEWORKS[source]].has_pytorch_modules and row["zero_stage"] in ("2", "3"):
        return "Megatron's FSDP is not modelled"
    if TRAITS[FRAMEWORKS[source]].has_one_shard_group and row["zero_stage"] not in ("2", "3"):
        return "FSDP that shards no gradients is not modelled"
    return None


def recompute_of_row(row: Row) -> str | None:
    """Recomputation as a strategy writes it; None where it is not understood; empty for the framework's default."""
    text = row["recompute"]
    if text.startswith("selective:"):
        return text
    return RECOMPUTE.get(text) if text else ""


def _recompute(row: Row) -> str | None:
    return f"recomputation is not understood: {row['recompute']}" if recompute_of_row(row) is None else None


def _features(row: Row) -> str | None:
    if reason := recipes.why_row_is_unmodelled(row, UNMODELLED_OVERLAPS) or recipes.why_row_is_implausible(row):
        return reason
    if reason := recipes.why_recipe_of_row_is_unmodelled(row):
        return reason
    if recipes.cuda_graphs_of_row(row) is None:
        return "what its CUDA graphs hold is not understood"
    if "26.06.01" in row["framework"] and "oss" in row["model"].lower():
        return "the source calls it a regression"
    return None


def _oom(row: Row) -> bool:
    # alone or as OOM_on_rank0; "too close to OOM" ran (bloom-027)
    return re.search(r"(?<![A-Za-z])(?<!close to )OOM(?![A-Za-z])", row["notes"]) is not None


def _measured(row: Row) -> str | None:
    power = gpu_of_row(row) in POWER_LIMITED
    memory = bool(row["measured_peak_mem_gib"]) and source_of_row(row) in MEMORY
    known = row["measured_step_time_s"] or row["measured_tokens_per_s_per_gpu"] or step_s_by_throughput(row)
    time = bool(known) and not power
    if time or memory or _oom(row):
        return None
    return "clocks are limited and no memory is given" if power else "neither step time, tokens/s nor memory is given"


RULES: tuple[Callable[[Row], str | None], ...] = (
    _framework, _hardware, _precision, why_row_has_no_model, _degrees, _recompute, _features, _measured,
)  # fmt: skip
"""Why a row is not usable, in the order in which they are asked; None where it passes."""


def why_row_is_unusable(row: Row) -> str | None:
    """The first rule's reason against a row, or None."""
    return next((reason for rule in RULES if (reason := rule(row)) is not None), None)


def _framework_of(row: Row, source: str, gpu: str) -> dict[str, Any]:
    """The framework's options of a row."""
    framework: dict[str, Any] = {
        "name": FRAMEWORKS[source],
        **recipes.framework_options_of_row(row, gpu, in_fp8=product_format_of_row(row) != "bf16"),
    }  # fmt: skip
    if TRAITS[framework["name"]].has_pytorch_modules:
        framework["compile"] = "torch.compile" in f"{row['overlap_notes']} {row['framework']}"
        if TRAITS[framework["name"]].has_one_shard_group and row["zero_stage"] == "2":  # SHARD_GRAD_OP
            framework["reshard_after_forward"] = False
        if "HSDP" in row["overlap_notes"]:  # shards inside a node, replicas over nodes
            framework |= {"data_parallel": "hsdp", "dp_replicate": int(row["n_gpus"]) // 8}
        # until pull request 1094, of the end of July 2025; rows of PyTorch 2.9's nightlies are of August
        if source == "titan" and row["date"] < "2025-08" and "torch 2.9 dev" not in row["notes"]:
            framework["ends_apart"] = False
        if re.search(GATHERS_FP8, f"{row['precision']}; {row['overlap_notes']}"):
            framework |= {"fp8_all_gather": True, "fp8_scales_ahead": True}
        if "torchao 0.10" in row["notes"]:  # of April 2025: its loss is not compiled yet ("causes CUDA errors")
            framework["compile_loss"] = False
        if "torch 2.9 dev" in row["notes"] and gpu.startswith("B200"):  # cuDNN's attention, not yet in the list of ops
            framework["saves_attention"] = False
    elif row["zero_stage"] == "0":
        framework["data_parallel"] = "ddp"
    if graphs := recipes.cuda_graphs_of_row(row):
        framework["cuda_graphs"] = graphs
    if source == "bloom":
        framework |= _deepspeed_of(row)
    return framework


def _deepspeed_of(row: Row) -> dict[str, Any]:
    """DeepSpeed's options of a row of BLOOM's."""
    optimizer = "bf16" if "BF16 optimizer" in row["notes"] else "zero1"
    framework: dict[str, Any] = {"deepspeed": optimizer, **DEEPSPEED[optimizer]}
    if row["zero_stage"] == "0" and "BF16 optimizer" not in row["notes"]:
        framework["deepspeed"] = "zero0"
    if framework["deepspeed"] == "zero1" and row["precision"] == "bf16":
        framework["casts_to_reduce"] = True
    framework["launch_blocking"] = int(row["n_gpus"]) >= BLOCKING_GPUS
    counted = row["id"] in EMBEDDINGS_COUNTED or "BF16 optimizer" in row["notes"]
    framework["splits_layers"] = "greedy-embeddings" if counted else "greedy"
    return framework


def run_mapping_of_row(row: Row) -> dict[str, Any]:
    """The configuration of a usable row as a run file has it."""
    source, gpu = source_of_row(row), gpu_of_row(row)
    strategy: dict[str, Any] = {"tp": whole_number_in_column(row, "tp"), "pp": whole_number_in_column(row, "pp")}
    given = {column: whole_number_in_column(row, column) for column in ("vpp", "cp", "ep")}
    given["vpp"] = given["vpp"] or recipes.virtual_stages_of_row(row)
    for column, value in {**given, "etp": recipes.etp_of_row(row)}.items():
        if value is not None and (value > 1 or column == "etp") and (column not in ("ep", "etp") or row["moe_experts"]):
            strategy[column] = value
    if source == "simumax" and strategy.get("cp", 1) > 1:
        strategy["cp_kind"] = "a2a"
    if row["sp"] and strategy["tp"] > 1:
        strategy["sp"] = row["sp"] == "1"
    if recompute := recompute_of_row(row):
        strategy["recompute"] = recompute
    framework = _framework_of(row, source, gpu)
    precision = {"gemm": product_format_of_row(row)}
    if recipes.holds_bf16_moments(row):
        precision["moments"] = "bf16"
    if re.search("hybridep", row["overlap_notes"], re.IGNORECASE):
        framework["dispatcher"] = "deepep"
    card = recipes.model_card_recipe(row["model"], gpu)
    strategy |= card.strategy if card else {}
    if layout := recipes.layout_of_row(row, strategy["pp"] or 1, strategy.get("vpp", 1)):
        strategy["layout"] = layout
    routing = recipes.routing_of_row(row)
    return {
        "id": row["id"],
        "model": model_of_row(row),
        "framework": framework,
        "hardware": OWN_NODES.get(source, {}).get(gpu) or NODES.get(gpu) or POWER_LIMITED[gpu],
        "gpus": whole_number_in_column(row, "n_gpus"),
        "strategy": strategy,
        "batch": {
            "seq_len": whole_number_in_column(row, "seq_len"),
            "micro": whole_number_in_column(row, "mbs"),
            "global": whole_number_in_column(row, "gbs"),
        },
        "precision": precision,
        **({"routing": routing} if routing else {}),
    }


def measured_mapping_of_row(row: Row) -> dict[str, Any]:
    """What a usable row measured: step time or tokens/s, never MFU; FLOP/s where its source says how they count."""
    if _oom(row):
        return {"oom": True}
    out: dict[str, Any] = {}
    if gpu_of_row(row) not in POWER_LIMITED:
        if row["measured_step_time_s"]:
            out["step_s"] = float(row["measured_step_time_s"])
        elif row["measured_tokens_per_s_per_gpu"]:
            tokens = int(row["gbs"]) * int(row["seq_len"])
            rate = float(row["measured_tokens_per_s_per_gpu"]) * int(row["n_gpus"])
            out["step_s"] = round(tokens / rate, 6)
        elif step_s := step_s_by_throughput(row):
            out["step_s"] = round(step_s, 6)
    kind = MEMORY.get(source_of_row(row))
    if kind and row["measured_peak_mem_gib"]:
        out[f"{kind}_bytes"] = float(row["measured_peak_mem_gib"]) * UNIT.get(source_of_row(row), GIB)
    if per_rank := re.search(r"max reserved ([\d.]+) GiB", row["notes"]):
        out["reserved_bytes"] = float(per_rank[1]) * GIB
    if per_rank := re.search(r"per-rank max_allocated GiB: ([\d., ]+)", row["notes"]):
        ranks = [float(text) * GIB for text in re.findall(r"\d+(?:\.\d+)?", per_rank[1])]
        if len(ranks) == int(row["n_gpus"]):
            out["ranks_allocated_bytes"] = ranks
    return out


def notes_of_row(row: Row) -> list[str]:
    """Notes of a row: what a reader of its score must know."""
    notes = []
    if recipes.model_card_recipe(row["model"], gpu_of_row(row)):
        notes.append("what the recipe says that its card names")
    elif not row["recompute"]:
        notes.append("recomputation not given: the framework's default")
    if gpu_of_row(row) in POWER_LIMITED:
        notes.append(f"memory only: {gpu_of_row(row)}")
    if source_of_row(row) == "bloom":
        notes.append("the vocabulary is the lab book's where the row has none")
    if row.get(BY_RULE):
        notes.append(f"filled by a rule: {row[BY_RULE]}")
    if row["precision"] == "fp16":
        notes.append("fp16 at bf16's rate")
    return notes


def import_published_rows(rows: Sequence[Row], folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Usable rows as published runs, and the others with the rule's reason.

    Parameters
    ----------
    rows
        Of the table, in order.
    folder
        Of the published runs, which the runs' own hardware files are relative to.
    """
    usable, unusable = [], []
    seen: dict[str, str] = {}
    rows = [with_filled_columns(with_section_columns(row)) for row in rows]
    read = [row for row in rows if MEMORY.get(source_of_row(row)) == "device"]
    against = contradictory_memory_rows(read)
    never_full = implausible_out_of_memory([row for row in read if _oom(row)], read)
    against |= {by: id for id, (by, _) in never_full.items()}
    for row in rows:
        reason = why_row_is_unusable(row)
        item: dict[str, Any] = {}
        if reason is None:
            run = run_mapping_of_row(row)
            item = {
                "run": run,
                "group": group_of_row(row),
                "model": row["model"],
                "measured": measured_mapping_of_row(row),
                "source": row["source_url_or_repo_path"],
                "notes": notes_of_row(row),
            }
            if switches := recipes.unfitted_switches_of_row(row, run["framework"]):
                item["switches"] = switches
            if row["id"] in against:
                item["measured"].pop("device_bytes")
                item["notes"].append(f"its memory is not used: {against[row['id']]} contradicts it")
            if row["id"] in never_full:
                by, most = never_full[row["id"]]
                item["measured"]["oom_denied_by"] = by
                item["notes"].append(
                    f"that it went out of memory is not used: by the reading of {by} it takes at most {most:.0f} GB"
                )
            reason = _refused(row, item, folder) or _seen_before(row, item, seen)
        if reason is None:
            usable.append(item)
        else:
            group = f"published-{source_of_row(row)}"
            unusable.append({"id": row["id"], "group": group, "gpu": gpu_of_row(row), "reason": reason})
    return usable, unusable


def _refused(row: Row, item: dict[str, Any], folder: Path) -> str | None:
    """Why the configuration cannot run at all, in the words of the planner's own checks; nothing is predicted."""
    try:
        run = spec_from_mapping(RunSpec, item["run"], row["id"])
        workload, cluster, framework, strategy = resolve_run(run, folder)
        checked_strategy_row(workload, cluster, framework, strategy)
    except SpecError as error:
        return "refused: " + re.sub(r"^.*?: ", "", str(error), count=1)
    return why_bundled_model_differs(row, workload.model)


def _seen_before(row: Row, item: dict[str, Any], seen: dict[str, str]) -> str | None:
    """A lab book repeats rows from section to section: the same configuration with the same result counts once."""
    model = item["run"]["model"]
    if isinstance(model, dict):
        model = {key: value for key, value in model.items() if key not in ("name", "source")}
    content = repr((model, {k: v for k, v in item["run"].items() if k not in ("id", "model")}, item["measured"]))
    first = seen.setdefault(hashlib.sha256(content.encode()).hexdigest(), row["id"])
    return None if first == row["id"] else f"the same row as {first}"


def assign_halves_to_published_runs(
    cells: Sequence[tuple[str, str]], dealt: Mapping[tuple[str, str], Split] | None = None
) -> dict[tuple[str, str], Split]:
    """Deal the models of each source out in turn, in the order of a hash, to judging and fitting.

    Rows of one source and model hang together, so that they share a split. Those that were ``dealt`` before stay where
    they are, and others take the turns behind theirs.

    Examples
    --------
    >>> assign_halves_to_published_runs([("a", "x"), ("a", "y"), ("a", "x"), ("korth", "z")])
    {('a', 'x'): 'judging', ('a', 'y'): 'fitting', ('korth', 'z'): 'judging'}
    >>> assign_halves_to_published_runs([("a", "x"), ("a", "y")], {("a", "y"): "judging"})
    {('a', 'y'): 'judging', ('a', 'x'): 'fitting'}
    """
    before = {cell: split for cell, split in (dealt or {}).items() if cell in cells}
    splits: dict[tuple[str, str], Split] = dict(before)
    of_source: dict[str, int] = {}
    for source, _ in before:
        of_source[source] = of_source.get(source, 0) + 1
    new = set(cells) - set(before)
    for cell in sorted(new, key=lambda c: (c[0], hashlib.sha256(f"{c[0]} {c[1]}".encode()).hexdigest())):
        turn = of_source.get(cell[0], 0)
        of_source[cell[0]] = turn + 1
        splits[cell] = "judging" if turn % 2 == 0 or cell[0] in JUDGING_ONLY else "fitting"
    return splits


def halves_of_previous_runs(folder: Path) -> dict[tuple[str, str], Split]:
    """The halves, fitting or judging, of the sources and models that a folder of published runs holds."""
    splits: dict[tuple[str, str], Split] = {}
    for path in sorted(folder.glob("*.yaml")):
        for item in spec_from_mapping(PublishedFile, load_yaml(path), str(path)).runs:
            splits[item.run.id.rpartition("-")[0], item.model] = item.split
    return splits


def write_published_runs(table: Path, folder: Path) -> tuple[int, int]:
    """Write the usable rows of a CSV as one YAML file a source, and the others into ``unusable.csv``.

    Returns
    -------
    int, int
        Usable and unusable rows.
    """
    with table.open(newline="") as file:
        rows: list[Mapping[str, str]] = list(csv.DictReader(file))
    usable, unusable = import_published_rows(rows, folder)
    sources: dict[str, list[dict[str, Any]]] = {}
    splits = assign_halves_to_published_runs(
        [(source_of_row(item["run"]), item["model"]) for item in usable], halves_of_previous_runs(folder)
    )
    for item in usable:
        item["split"] = splits[source_of_row(item["run"]), item["model"]]
        PublishedRun.model_validate(item)
        sources.setdefault(source_of_row(item["run"]), []).append(item)
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in sources.items():
        text = yaml.safe_dump({"source": f"{table.name}, rows {name}-*", "runs": items}, sort_keys=False, width=120)
        (folder / f"{name}.yaml").write_text(text)
    with (folder / UNUSABLE).open("w", newline="") as file:
        writer = csv.DictWriter(file, ("id", "group", "gpu", "reason"), lineterminator="\n")
        writer.writeheader()
        writer.writerows(unusable)
    return len(usable), len(unusable)
