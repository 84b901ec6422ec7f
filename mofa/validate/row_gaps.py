"""What a published row leaves open, filled from its source's files or by a rule that was written before.

The rules are data, ``filled`` of ``reference_runs/published/recipes/options.yaml``, but for one: a lab book's number of
layers, which its throughput says. No rule reads how long a step took or what it held.
"""

from __future__ import annotations

import re

from mofa.validate.architecture import LLAMA, Row, source_of_row, whole_number_in_column
from mofa.validate.recipes import load_recipes

BY_RULE = "by_rule"
"""Column of a row that a rule filled: what the rule says."""
FLOPS_PER_LAYER = 8 * 12
"""Of the lab book's estimator: 4 passes (with recomputation) x 2, for each token and each of the 12 h^2 parameters of a
layer; the embedding is not counted ("older estimator", bigscience pull request 251 replaces it)."""
NEAR_WHOLE = 0.1
"""How far from a whole number the layers may lie that two rounded columns give. [-]"""


def with_filled_columns(row: Row) -> Row:
    """A row with the columns that its source's files or a rule fill; what is given stays as it is.

    Examples
    --------
    >>> row = dict.fromkeys(("vpp", "mbs", "notes", "layers"), "")
    >>> row |= {"id": "mlperf-035", "model": "GPT3-175B", "framework": "NeMo (MLPerf v3.1)", "mbs": "1"}
    >>> with_filled_columns(row)["vpp"], "by_rule" in with_filled_columns(row)
    ('12', False)
    """
    filled, rules = dict(row), []
    if not row["layers"] and (layers := layers_by_throughput(row)) is not None:
        filled["layers"] = str(layers)
    for rule in load_recipes().filled:
        if rule.fills(row):
            filled |= {name: text for name, text in rule.columns.items() if not row[name] or name in rule.where}
            rules += [rule.source] if rule.by_rule else []
    return {**filled, BY_RULE: "; ".join(rules)} if rules else filled


FULL_ATTENTION = ("nemo",)
"""Sources whose FLOP/s are 6 for each parameter and token, the embedding's table once, and 12 x layers x hidden x
sequence for attention, not halved: their rows that print tokens/s as well give that within 0.1 %."""


def step_s_by_throughput(row: Row) -> float | None:
    """Step time of a dense row that prints FLOP/s alone, by the formula of its source; None where it has none. [s]

    Examples
    --------
    nemo-005 prints both: 780 TFLOP/s and 16,934 tokens/s on 8 H100 at a global batch of 128, which is 3.870 s.

    >>> row = {"id": "nemo-005", "model": "LLAMA2-7B", "layers": "32", "hidden": "4096", "ffn": "11008", "heads": "32",
    ...        "kv_heads": "32", "vocab": "32000", "seq_len": "4096", "gbs": "128", "n_gpus": "8", "moe_experts": "",
    ...        "measured_tflops_per_gpu": "780"}
    >>> round(step_s_by_throughput(row), 2)
    3.87
    """
    columns = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq_len", "gbs", "n_gpus")
    if source_of_row(row) not in FULL_ATTENTION or row["moe_experts"] or not row["measured_tflops_per_gpu"]:
        return None
    if not all(row[name] for name in columns):
        return None
    layers, hidden, ffn, heads, kv_heads, vocab, seq, batch, gpus = (float(row[name]) for name in columns)
    matrices = 3.0 if re.search(LLAMA, row["model"].lower()) else 2.0
    in_layer = 2.0 * hidden**2 * (1.0 + kv_heads / heads) + matrices * hidden * ffn
    per_token = 6.0 * (layers * in_layer + vocab * hidden) + 12.0 * layers * hidden * seq
    return per_token * batch * seq / (1e12 * float(row["measured_tflops_per_gpu"]) * gpus)


def layers_by_throughput(row: Row) -> int | None:
    """Layers of a row of the lab book that prints throughput and step time but not them; None where they do not say.

    TFLOP/s x seconds x GPUs is the work that its estimator counted, whatever the step took: 8 x 12 h^2 x tokens for
    each layer. The rows that name their layers give them back (80.02 for 80); what gives no whole number that the
    stages divide is left open.

    Examples
    --------
    >>> row = {"id": "bloom-015", "hidden": "14400", "seq_len": "2048", "gbs": "2048", "n_gpus": "384", "pp": "12",
    ...        "measured_tflops_per_gpu": "90.84", "measured_step_time_s": "172.4"}
    >>> layers_by_throughput(row)
    72
    """
    columns = ("hidden", "seq_len", "gbs", "n_gpus", "pp", "measured_tflops_per_gpu", "measured_step_time_s")
    if source_of_row(row) != "bloom" or not all(row[name] for name in columns):
        return None
    hidden, tokens = float(row["hidden"]), float(row["seq_len"]) * float(row["gbs"])
    work = 1e12 * float(row["measured_tflops_per_gpu"]) * float(row["measured_step_time_s"]) * float(row["n_gpus"])
    layers = work / (FLOPS_PER_LAYER * hidden**2 * tokens)
    nearest = round(layers)
    stages = whole_number_in_column(row, "pp") or 1
    return nearest if abs(layers - nearest) <= NEAR_WHOLE and nearest % stages == 0 else None
