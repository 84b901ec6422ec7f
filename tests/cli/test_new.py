"""``mofa new workload``: a complete YAML to fill in, that names all that is left when it is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mofa.specs.files import bundled_names
from mofa.specs.load import load_workload
from tests.cli.conftest import Cli, one_line_of

LLAMA = {
    "num_layers": 32, "hidden": 4096, "vocab": 128256, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
    "ffn_hidden": 14336, "seq_len": 8192, "global_batch": 1024, "tokens": "15T", "name": "llama3-8b",
    "source": "a test",
}  # fmt: skip


@pytest.mark.parametrize("name", bundled_names("workloads"))
def test_filled_in_with_the_numbers_of_its_model_it_is_that_workload(cli: Cli, name: str) -> None:
    """The comments hold them; whoever writes them in gets the bundled workload, name and source apart."""
    text = cli("new", "workload", "--like", name).stdout
    given = load_workload(name)
    filled = re.sub(rf"\?\?\?(.*; {re.escape(name)}: (\S+))$", r"\2\1", text, flags=re.MULTILINE)
    filled = filled.replace("tokens: ???", f"tokens: {given.tokens:.0f}" if given.tokens else "tokens:")
    filled = filled.replace("name: ???", f"name: {name}").replace("source: ???", "source: test")
    Path("filled.yaml").write_text(filled)
    job = load_workload("filled.yaml")
    model = given.model.model_copy(update={"source": "test"})
    assert job.model == model
    assert (job.batch, job.tokens, job.framework) == (given.batch, given.tokens, given.framework)


def test_reading_it_names_all_that_is_left(cli: Cli) -> None:
    assert cli("new", "workload", "--like", "llama3-8b", "--out", "job.yaml").returncode == 0
    done = cli("show", "workload", "job.yaml")
    assert done.returncode == 2
    line = one_line_of(done.stderr)
    for field in ("model.num_layers", "model.attention.head_dim", "model.mlp.ffn_hidden", "batch.seq_len", "tokens"):
        assert field in line
    file = Path("job.yaml")
    text = file.read_text()
    for field, value in LLAMA.items():
        text = re.sub(rf"(?<=\b{field}: )\?\?\?", str(value), text)
    file.write_text(text)
    done = cli("show", "workload", "job.yaml")
    assert "8,030,261,248" in done.stdout, done.stderr


def test_missing_fields_are_named_at_once(cli: Cli) -> None:
    Path("job.yaml").write_text("name: x\nmodel: {name: y, source: a test, hidden: 8}\ntokens: 1T\n")
    line = one_line_of(cli("show", "workload", "job.yaml").stderr)
    assert line == (
        "mofa: job.yaml: source, model.num_layers, model.vocab, model.attention, model.mlp, batch.seq_len, "
        "batch.global_batch are missing; add them"
    )


def test_it_begins_from_a_config_of_an_unknown_class(cli: Cli) -> None:
    """The refusal says the command; it fills in what the keys say and leaves the rest."""
    config = {
        "architectures": ["NobodyForCausalLM"], "model_type": "nobody", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100_000, "num_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1024, "tie_word_embeddings": True, "sliding_window": 5,
    }  # fmt: skip
    Path("nobody.json").write_text(json.dumps(config))
    line = one_line_of(cli("plan", "nobody.json", "h100-hgx", "--gpus", "8").stderr)
    assert "architectures (NobodyForCausalLM) is no model that mofa reads" in line
    command = "new workload --like qwen3-30b-a3b --from-config nobody.json"
    assert f"begin a workload YAML by mofa {command}" in line
    done = cli(*command.split(), "--out", "nobody.yaml")
    assert done.returncode == 0, done.stderr
    assert "  moe:  # leave these lines out where all layers are dense\n" in Path("nobody.yaml").read_text()
    assert cli("new", "workload", "--from-config", "nobody.json").stdout == Path("nobody.yaml").read_text()
    left = one_line_of(cli("show", "workload", "nobody.yaml").stderr)
    assert left.startswith(
        "mofa: nobody.yaml: model.attention.head_dim, batch.seq_len, batch.global_batch, tokens: still ???"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--like: is missing"),
        (("--like", "qwen3-30b"), "qwen3-30b is no bundled workload; did you mean qwen3-30b-a3b?"),
        (("--like", "llama3-8b", "--out", "no/job.yaml"), "the directory no does not exist"),
        (("--from-config", "none.json"), "none.json: no such file"),
        (("--like", "llama3-8b", "--out", "-"), "a name is needed"),
    ],
)
def test_what_it_refuses(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    done = cli("new", "workload", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in one_line_of(done.stderr)


def test_it_writes_over_no_file(cli: Cli) -> None:
    Path("job.yaml").write_text("mine")
    done = cli("new", "workload", "--like", "llama3-8b", "--out", "job.yaml")
    assert "job.yaml: exists; name another file" in one_line_of(done.stderr)
    assert Path("job.yaml").read_text() == "mine"
