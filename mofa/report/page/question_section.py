"""The head of a report: what was asked, what to run, and how sure that is."""

from __future__ import annotations

from mofa.report.page.document_parts import DataTable, Paragraph, Part, Piece, Section, Tile, Tiles, paragraph
from mofa.report.page.facts import BEST, ReportFacts, gib_text
from mofa.report.phrases import strategy_text
from mofa.report.search_text import has_experts, idle_gpus_lines, step_band_lines, ties_line
from mofa.units import format_count

OBJECTIVES = {
    "tokens_per_s_per_gpu": "tokens a second and GPU, at the batch asked for",
    "effective_tokens_per_s_per_gpu": "tokens a second and GPU over the run with its failures",
    "days": "days of the run with its failures", "usd": "its price", "kwh": "its energy",
}  # fmt: skip
FIELDS = {
    "tp": "tensor parallelism: ranks that share every layer's products",
    "sp": "sequence parallelism: norms and dropout split over those ranks",
    "pp": "pipeline stages", "vpp": "chunks of layers of each stage",
    "cp": "context parallelism: ranks that share each sequence", "cp_kind": "how attention reaches all keys",
    "ep": "expert parallelism: ranks that share the experts", "etp": "tensor parallelism of the experts",
    "dp": "data parallelism: replicas of the model", "micro_batch": "sequences that a replica takes at a time",
    "zero": "what replicas share: 1 optimizer states, 2 gradients too, 3 parameters too",
    "recompute": "activations that the backward computes again", "schedule": "order of the pipeline",
    "dispatcher": "how tokens reach their experts", "token_chunks": "chunks in which tokens pass the experts",
    "balancing": "whether experts are replicated by their load", "tp_overlap": "its communication beside products",
    "overlap_param_gather": "whether parameters are gathered beside the forward", "layout": "what each chunk holds",
    "dp_replicate": "replicas of a shard group",
}  # fmt: skip
"""What the words of a strategy mean."""


def answer_section(facts: ReportFacts) -> Section:
    """The plan in one look: its strategy, its figures, and how sure they are."""
    plan, report = facts.report.plans[0], facts.report
    strategy = strategy_text(plan.strategy, moe=has_experts(report.workload))
    parts: list[Part] = [paragraph("Run it as ", strategy, ".", tone="lead"), Tiles(tuple(_tiles(facts)))]
    if plan.band is not None and plan.band.unmeasured:
        parts += [paragraph(line, tone="warning") for line in step_band_lines(plan.band)[:1]]
    if report.num_tied > 1:
        parts.append(paragraph(ties_line(report).strip()))
    parts += [paragraph(line, tone="warning") for line in idle_gpus_lines(report)]
    parts.append(_strategy_table(facts))
    return Section("plan", "The plan", tuple(parts))


def _tiles(facts: ReportFacts) -> list[Tile]:
    plan = facts.report.plans[0]
    band = "" if plan.step_s_band is None else "8 in 10: {:.3g} to {:.3g} s".format(*plan.step_s_band)
    limit = f"of {gib_text(plan.memory.limit_bytes)} that a plan may fill"
    tiles = [
        Tile("a step", facts.shown_seconds(f"{BEST}.step_s"), band),
        Tile("tokens/s/GPU", facts.shown_token_rate(f"{BEST}.tokens_per_s_per_gpu")),
        Tile("MFU", facts.shown_share(f"{BEST}.mfu"), f"{plan.tflops_per_gpu:.1f} TFLOP/s a GPU"),
        Tile("memory of the fullest GPU", facts.shown_gib(f"{BEST}.memory.device_bytes"), limit),
    ]
    if plan.days is not None:
        said = "half of such runs are over by then; the error of the step is not counted"
        tiles.append(Tile("days with failures", facts.shown_token_rate(f"{BEST}.days.p50"), said))
    elif plan.days_without_failures is not None:
        tokens = facts.report.workload.tokens
        of = "" if tokens is None else f"{format_count(tokens)} tokens, no failures counted"
        tiles.append(Tile("days", facts.shown_token_rate(f"{BEST}.days_without_failures"), of))
    if plan.usd is not None:
        tiles.append(Tile("price", facts.shown_number(f"{BEST}.usd", lambda value: f"{value:,.0f} USD")))
    return tiles


def _strategy_table(facts: ReportFacts) -> DataTable:
    strategy = facts.report.plans[0].strategy
    shown = strategy.model_dump(exclude_none=True)
    rows = [
        (name, str(shown[name]).lower() if isinstance(shown[name], bool) else str(shown[name]), words)
        for name, words in FIELDS.items()
        if shown.get(name) not in (None, "", 1, False, "none") or name in ("tp", "pp", "dp", "recompute")
    ]
    columns = (("field", "left"), ("value", "right"), ("what it is", "left"))
    return DataTable(columns, rows, folded="The strategy field by field")


def question_section(facts: ReportFacts) -> Section:
    """What was asked: the job, the machines, the framework and the goal."""
    report = facts.report
    job, cluster, framework = report.workload, report.cluster, report.framework
    active: tuple[Piece, ...] = ()
    if has_experts(job):
        active = (" (", facts.shown_count("result.workload.num_active_params"), " active)")
    asked = Paragraph((
        "How should ", job.name, ", ", facts.shown_count("result.workload.num_params"), " parameters", *active,
        ", be laid out on ", facts.shown_count("result.cluster.num_gpus"), f" x {cluster.gpu}?",
    ), "lead")  # fmt: skip
    tokens: list[tuple[Piece, ...]] = []
    if job.tokens is not None:
        tokens = [("tokens to train on", facts.shown_count("result.workload.tokens"))]
    rows: list[tuple[Piece, ...]] = [
        ("layers", facts.shown_count("result.workload.num_layers")),
        ("sequence", facts.shown_count("result.workload.seq_len")),
        ("global batch", facts.shown_count("result.workload.global_batch")),
        *tokens,
        ("numerics", f"{job.gemm_format} products, {job.moments_format} moments"),
        ("routing", job.routing),
        ("machines", f"{cluster.name}, {cluster.gpus_per_node} GPUs a node, {cluster.gpus_per_domain} a fast domain"),
        ("memory of a GPU", facts.shown_gib("result.cluster.capacity_bytes")),
        ("framework", f"{framework.name} {framework.version}, {framework.data_parallel}, {framework.dispatcher}"),
        ("best is", OBJECTIVES.get(report.objective, report.objective)),
    ]
    if not has_experts(job):
        rows.remove(("routing", job.routing))
    fixed = facts.report.defaults.get("fixed", "")
    parts: list[Part] = [asked]
    if fixed:
        parts.append(paragraph(f"You fixed {fixed}; the search left these as they are."))
    table = DataTable((("", "left"), ("", "left")), rows, folded="The job, the machines and the framework")
    return Section("question", "The question", (*parts, table))
