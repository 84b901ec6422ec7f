"""Steps of layers that are not modelled yet are refused by name by every command; their facts are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import mofa
from mofa.errors import SpecError
from mofa.measure.expand import expand_run
from tests.cli.conftest import Cli, one_line_of

CONFIGS = Path(__file__).parent.parent / "specs" / "configs"
HYBRID = str(CONFIGS / "Qwen--Qwen3-Next-80B-A3B-Instruct.json")
BATCH = ("--seq-len", "4096", "--global-batch", "64")
JOB = (HYBRID, "h100-hgx", "--gpus", "8", *BATCH)
STRATEGY = ("--strategy", "ep=4 micro_batch=1")
SAYS = "linear attention is not modelled yet (gated delta net in 36 of 48 layers); mofa show workload"
REFUSED = {
    "Qwen--Qwen3.5-397B-A17B": "linear attention is not modelled yet (gated delta net in 45 of 60 layers)",
    "ai21labs--AI21-Jamba-1.5-Large": "linear attention is not modelled yet (Mamba in 63 of 72 layers)",
    "nvidia--Nemotron-H-56B-Base-8K": "linear attention is not modelled yet (Mamba-2 in 54 of 118 layers)",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "linear attention is not modelled yet (Mamba-2 in 23 of 52 layers)",
    "tiiuae--Falcon-H1-34B-Base": "linear attention is not modelled yet (Mamba-2 in 72 of 72 layers)",
    "ibm-granite--granite-4.0-h-small": "linear attention is not modelled yet (Mamba-2 in 36 of 40 layers)",
    "ibm-ai-platform--Bamba-9B-v1": "linear attention is not modelled yet (Mamba-2 in 29 of 32 layers)",
    "moonshotai--Kimi-Linear-48B-A3B-Base":
        "linear attention is not modelled yet (Kimi delta attention in 20 of 27 layers)",
    "MiniMaxAI--MiniMax-M1-80k": "linear attention is not modelled yet (lightning attention in 70 of 80 layers)",
    "MiniMaxAI--MiniMax-Text-01-hf": "linear attention is not modelled yet (lightning attention in 70 of 80 layers)",
    "deepseek-ai--DeepSeek-V3.2": "sparse attention is not modelled yet (attention with an indexer in 61 of 61 layers)",
    "zai-org--GLM-5": "sparse attention is not modelled yet (attention with an indexer in 78 of 78 layers)",
    "deepseek-ai--DeepSeek-V4-Flash":
        "sparse attention is not modelled yet (attention over compressed tokens in 43 of 43 layers)",
    "XiaomiMiMo--MiMo-V2-Flash": "attention of several shapes is not modelled yet",
    "meituan-longcat--LongCat-Flash-Chat": "several attentions in one layer are not modelled yet",
    "stepfun-ai--step3": "multi-matrix factorized attention is not modelled yet (in 61 of 61 layers)",
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": "layers without attention are not modelled yet (31 of 80)",
}  # fmt: skip
"""Of each class, what is said of its steps."""


@pytest.mark.parametrize(
    "command",
    [
        ("plan", *JOB),
        ("plan", *JOB, "--json"),
        ("estimate", *JOB, *STRATEGY),
        ("estimate", *JOB, *STRATEGY, "--no-replay"),
        ("export", *JOB, "--to", "megatron"),
        ("goodput", *JOB, "--faults", "llama3"),
        ("trace", *JOB, *STRATEGY, "--out", "step.json"),
        ("balance", *JOB, *STRATEGY),
        ("chunks", *JOB, *STRATEGY),
    ],
    ids=lambda command: " ".join(word for word in (command[0], *command[8:]) if word.isalpha() or word[:2] == "--"),
)
def test_every_command_of_steps_refuses_them_by_name(cli: Cli, command: tuple[str, ...]) -> None:
    done = cli(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Qwen--Qwen3-Next-80B-A3B-Instruct: {SAYS}" in one_line_of(done.stderr)
    assert not Path("step.json").exists()


@pytest.mark.parametrize(("config", "says"), REFUSED.items())
def test_each_class_is_refused_by_what_it_has(cli: Cli, config: str, says: str) -> None:
    done = cli("plan", str(CONFIGS / f"{config}.json"), "h100-hgx", "--gpus", "64", *BATCH)
    assert done.returncode == 2
    assert f"{config}: {says}" in one_line_of(done.stderr)


def test_runs_of_them_are_neither_estimated_nor_measured(cli: Cli, tmp_path: Path) -> None:
    run = {
        "id": "hybrid", "model": HYBRID, "framework": "megatron", "hardware": "h100-hgx", "gpus": 8,
        "strategy": {"ep": 8}, "batch": {"seq_len": 4096, "micro": 1, "global": 64},
    }  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    for command in (("estimate", str(file)), ("trace", str(file), "--out", "step.json")):
        assert SAYS in one_line_of(cli(*command).stderr)
    with pytest.raises(SpecError, match="linear attention is not modelled yet"):
        expand_run(mofa.load_runs(file)[0])


def test_python_refuses_them_too() -> None:
    job, cluster = mofa.load_workload(HYBRID, seq_len=4096, global_batch=64), mofa.load_cluster("h100-hgx", 8)
    faults, strategy = mofa.load_faults("llama3"), {"ep": 4, "pp": 2}
    calls: list[Callable[[], object]] = [
        lambda: mofa.find_plans(job, cluster),
        lambda: mofa.find_long_runs(job, cluster, faults),
        lambda: mofa.estimate(job, cluster, strategy),
        lambda: mofa.estimate(job, cluster, strategy, replay=False),
        lambda: mofa.estimate_long_run(job, cluster, strategy, faults),
        lambda: mofa.find_layout(job, cluster, strategy),
    ]
    for call in calls:
        with pytest.raises(SpecError, match="linear attention is not modelled yet"):
            call()


def test_their_facts_are_shown(cli: Cli) -> None:
    """As text and as JSON: kinds of layers with their parameters, and the bytes that follow from them."""
    text = cli("show", "workload", HYBRID, *BATCH).stdout
    for part in ("gated delta net + moe", "1,648,531,648", "attention with an output gate + moe", "1,642,076,672"):
        assert part in text
    shown = json.loads(cli("show", "workload", HYBRID, *BATCH, "--json").stdout)
    assert shown["num_params"] == 79_674_391_296 == sum(part["total_params"] for part in shown["parts"])
    linear = shown["parts"][0]
    assert (linear["name"], linear["layers"], linear["params"]) == ("linear", 36, 1_648_531_648)
    assert linear["weight_bytes"] == 2 * 36 * 1_648_531_648
    assert linear["optimizer_bytes"] == 6 * linear["weight_bytes"]
    assert linear["recurrent_state_bytes"] == 4 * (32 * 128 * 128 + 8192 * 3)
    plain = json.loads(cli("show", "workload", "llama3-8b", "--json").stdout)
    assert "parts" not in plain
    assert "layers" not in plain["model"]


def test_routing_of_their_experts_is_shown(cli: Cli) -> None:
    done = cli("show", "routing", HYBRID, "--ep", "8", "--set", "workload.batch.seq_len=4096",
               "--set", "workload.batch.global_batch=64")  # fmt: skip
    assert done.returncode == 0, done.stderr
