"""Architecture columns of a published row as a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mofa.specs.attention.gqa import GQA

Row = Mapping[str, str]

BUNDLED = (
    (r"deepseek.?v3", "deepseek-v3"),
    (r"qwen3.?30b", "qwen3-30b-a3b"),
    (r"qwen3.?235b", "qwen3-235b-a22b"),
    (r"gpt.?oss.?120b", "gpt-oss-120b"),
    (r"kimi.?k2", "kimi-k2"),
    (r"mixtral.?8x7b", "mixtral-8x7b"),
    (r"mixtral.?8x22b", "mixtral-8x22b"),
)
"""Models with experts are the bundled ones of that name; the row's columns must agree with them."""
REDUCED: dict[tuple[str, str], dict[str, Any]] = {
    # "DeepSeekV3 formal rows use dense_layers=1" (its b200_release_v1.2_summary.json); its configurations know no
    # multi-token prediction (Models.md)
    ("simumax", "deepseek-v3"): {"moe": {"first_k_dense": 1}, "num_mtp_layers": 0},
}
"""What else differs in a source's models of fewer layers than the described one, by source and model."""
LLAMA = r"llama|codellama|qwen3|mistral"
GPT = r"gpt-?3|gpt-?\d+b|gpt-1t|bloom"
NEMOTRON = r"nemotron.?(8|15|22|340)b"
MPT = r"mpt"
BLOOM_VOCAB = 250_000
"""Tokens of the tokenizer of all rows of that lab book that say; rows that do not must agree by their parameters."""
HEADINGS = {("BLOOM-dev-181B", "GBS Variations"): {"layers": "72"}}
"""What the heading of a row's table says and the row does not, by model and section: ``NLAYERS=72, NHIDDEN=14336,
NHEADS=64`` stands over that section of the lab book (bigscience, train/tr11-176B-ml/chronicles-prequel.md), whose rows
are all of 181B, as 72 such layers are."""


def source_of_row(row: Row) -> str:
    """Source of a row: its id without the number."""
    return row["id"].rpartition("-")[0]


def is_mlperf_gpt3(row: Row) -> bool:
    """Whether a row is of MLPerf's GPT-3 175B: one of MLPerf's, or NeMo's of its configuration, with micro-batches of 2
    (NeMo-Framework-Launcher, conf/training/gpt3/175b_mlperf.yaml)."""
    return source_of_row(row) == "mlperf" or (
        source_of_row(row) == "nemo" and row["mbs"] == "2" and "175B" in row["model"]
    )


def with_section_columns(row: Row) -> Row:
    """A row with the columns of its section, which stand over its table.

    Examples
    --------
    >>> row = {"model": "BLOOM-dev-181B", "layers": "", "notes": 'section "GBS Variations"; measured at iteration 2'}
    >>> with_section_columns(row)["layers"]
    '72'
    """
    section = re.search(r'section "([^"]*)"', row.get("notes", ""))
    over = HEADINGS.get((row.get("model", ""), section[1] if section else ""), {})
    return {**row, **{name: text for name, text in over.items() if not row[name]}}


def whole_number_in_column(row: Row, name: str) -> int | None:
    """A whole number of a row, or None where the source does not give it."""
    text = row.get(name, "")
    return int(float(text)) if text else None


def why_row_has_no_model(row: Row) -> str | None:
    """Why the architecture is not complete or not modelled, or None."""
    name = row["model"].lower()
    for word, what in (("lora", "LoRA"), ("peft", "LoRA"), ("sft", "fine-tuning")):
        if word in name:
            return f"{what} is not modelled"
    attention = row["attention_type"].lower()
    for word in ("mamba", "hybrid", "sparse", "linear attention", "gated delta"):
        if word in attention:
            return f"attention or layers ({word}) are not modelled"
    if "megascale)" in name and row["framework"] == "MegaScale":
        return "parallel blocks are not modelled"
    missing = [c for c in ("layers", "hidden", "heads", "kv_heads", "seq_len") if not row[c]]
    if not row["vocab"] and _vocab(row) is None:
        missing.append("vocab")
    if missing:
        return f"architecture is not given: {', '.join(missing)}"
    if row["moe_experts"]:
        if not any(re.search(pattern, name) for pattern, _ in BUNDLED):
            return "model with experts is not one of those described here"
    elif not row["ffn"]:
        return "architecture is not given: ffn"
    elif not any(re.search(p, name) for p in (LLAMA, GPT, NEMOTRON, MPT)):
        return "architecture is not given: activation, norm and positions"
    return None


def model_of_row(row: Row) -> str | dict[str, Any]:
    """The model of a row that :func:`why_row_has_no_model` lets through."""
    name = row["model"].lower()
    if row["moe_experts"]:
        base = next(bundled for pattern, bundled in BUNDLED if re.search(pattern, name))
        changes: dict[str, Any] = {"base": base, "num_layers": whole_number_in_column(row, "layers")}
        if "w/o mtp" in name:
            changes["num_mtp_layers"] = 0
        return changes | REDUCED.get((row["id"].rpartition("-")[0], base), {})
    return _dense(row, name)


def _dense(row: Row, name: str) -> dict[str, Any]:
    hidden, heads = whole_number_in_column(row, "hidden"), whole_number_in_column(row, "heads")
    assert hidden is not None and heads is not None
    gpt, mpt = re.search(GPT, name) is not None, re.search(MPT, name) is not None
    plain = gpt or mpt or re.search(NEMOTRON, name) is not None
    attention: dict[str, Any] = {
        "kind": GQA.name,
        "num_heads": heads,
        "num_kv_heads": whole_number_in_column(row, "kv_heads"),
        "head_dim": whole_number_in_column(row, "head_dim") or hidden // heads,
    }
    if gpt or mpt:
        attention |= {"qkv_bias": True, "out_bias": True}
    if "qwen3" in name:
        attention["qk_norm"] = True
    mlp: dict[str, Any] = {
        "activation": "gelu" if plain else "swiglu",
        "ffn_hidden": whole_number_in_column(row, "ffn"),
    }
    if gpt or mpt:
        mlp["bias"] = True
    model: dict[str, Any] = {
        "name": row["model"],
        "source": f"columns of {row['id']}",
        "num_layers": whole_number_in_column(row, "layers"),
        "hidden": hidden,
        "vocab": whole_number_in_column(row, "vocab") or _vocab(row),
        "attention": attention,
        "mlp": mlp,
    }
    if plain:
        model["norm"] = "layernorm"
    if gpt or mpt:
        model |= {
            "positions": "learned",
            "max_positions": whole_number_in_column(row, "seq_len"),
            "tied_embeddings": True,
        }
    if "ALiBi" in row["attention_type"]:  # its script trains with --embed-layernorm
        model |= {"positions": "alibi", "embedding_norm": True}
        del model["max_positions"]
    # Megatron's defaults, which BLOOM inherits as well (bigscience, train/tr11-176B-ml/README.md, Optimizer); MLPerf's
    # GPT-3 has none (training_results_v3.1, NVIDIA's gpt3, conf/custom.yaml: hidden_dropout, attention_dropout)
    if gpt and not is_mlperf_gpt3(row):
        model["dropout"] = 0.1
    return model


def _vocab(row: Row) -> int | None:
    """The lab book's vocabulary where the row's parameters, to its last digit, agree with it."""
    if not row["id"].startswith("bloom-") or not (row["layers"] and row["hidden"] and row["params_b"]):
        return None
    hidden = float(row["hidden"])
    params = 12 * float(row["layers"]) * hidden**2 + BLOOM_VOCAB * hidden
    return BLOOM_VOCAB if abs(params / 1e9 - float(row["params_b"])) <= 1.0 else None


def why_bundled_model_differs(row: Row, model: Any) -> str | None:
    """Why a bundled model is not the row's, by the columns that the row gives, or None."""
    if not row["moe_experts"]:
        return None
    moe, attention = model.moe, model.attention
    pairs = (
        ("hidden", model.hidden), ("heads", attention.num_heads), ("vocab", model.vocab),
        ("moe_experts", moe.num_experts), ("moe_topk", moe.top_k), ("moe_ffn", moe.expert_hidden),
    )  # fmt: skip
    for column, value in pairs:
        if row[column] and whole_number_in_column(row, column) != value:
            return f"{column} ({row[column]}) is not the described model's ({value})"
    return None
