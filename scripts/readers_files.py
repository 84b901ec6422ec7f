"""Files of readers that the commands of README.md and docs/ read, for ``scripts/docs_commands.py``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "max_position_embeddings": 8192, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip

PUBLISHED = {"Qwen3-Next-80B-A3B": "Qwen--Qwen3-Next-80B-A3B-Instruct.json", "llama-65b": "huggyllama--llama-65b.json"}
"""Folders with the configuration of a published model."""


@lru_cache
def clusters_of_readers() -> dict[str, str]:
    """Files of nodes and GPUs that docs/clusters.md shows, by name. Plans on them that search are only parsed here:
    tests/cli/test_clusters.py makes them."""
    return _files_of_page("clusters.md")


def _files_of_page(page: str) -> dict[str, str]:
    """YAML that a page of docs/ shows below its file's name, by that name."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return {
        match[1]: match[2] for match in re.finditer(r"^```yaml\n# (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    }


@contextlib.contextmanager
def folder_of_readers_files() -> Iterator[Path]:
    """An empty folder with the files that the pages' commands read, as the working directory."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="mofa-docs-") as name:
        folder = Path(name)
        for model in ("my-hf-model", "my-model"):
            (folder / model).mkdir()
            (folder / model / "config.json").write_text(json.dumps(CONFIG))
        for model, published in PUBLISHED.items():
            (folder / model).mkdir()
            (folder / model / "config.json").symlink_to(ROOT / "tests" / "specs" / "configs" / published)
        failures = [
            f"n{i % 7},2025-0{1 + i % 6}-{1 + i:02d}T03:00:00,{('software', 'network')[i % 2]}" for i in range(20)
        ]
        for name, content in {**clusters_of_readers(), **_files_of_page("sweep.md")}.items():
            (folder / name).write_text(content, encoding="utf-8")
        (folder / "failures.csv").write_text(
            "\n".join(["node,time,kind", *sorted(failures, key=lambda f: f[4:])]) + "\n"
        )
        counts = [f"{i},0,{e},{100 + 7 * e + i}" for i in range(3) for e in range(32)]
        (folder / "counts.csv").write_text("\n".join(["iteration,layer,expert,tokens", *counts]) + "\n")
        replicas = [f"{e},{4 * k + e // 8}" for k in range(2) for e in range(32)]
        (folder / "replicas.csv").write_text("\n".join(["expert,gpu", *replicas]) + "\n")
        for shared in ("measurements", "reference_runs", "docs", "scripts"):
            (folder / shared).symlink_to(ROOT / shared)
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
