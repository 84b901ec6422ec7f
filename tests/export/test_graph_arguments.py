"""CUDA graphs in Megatron's words, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from mofa.errors import SpecError
from mofa.export.bridge.recipe import bridge_job_files
from mofa.export.megatron.launch_script import megatron_job_files
from mofa.export.megatron.megatron_table import MEGATRON
from mofa.export.read_job import read_job
from tests.export.jobs import megatron_job
from tests.export.test_megatron import BASE

GRAPHS = {
    "local": ("local", None),
    "local:full_iteration": ("local", ["full_iteration"]),
    "te": ("transformer_engine", None),
    "te:attn+mlp": ("transformer_engine", ["attn", "mlp"]),
}


@pytest.mark.parametrize("graphs", GRAPHS)
def test_graphs_are_written_and_come_back(graphs: str, tmp_path: Path) -> None:
    job = megatron_job(cuda_graphs=graphs)
    values = MEGATRON.write_arguments(job)
    assert (values["cuda-graph-impl"], values.get("cuda-graph-scope")) == GRAPHS[graphs]
    assert values["te-rng-tracker"] is True and "$NCCL_GRAPH_REGISTER" not in values
    file = tmp_path / "job.sh"
    file.write_text(megatron_job_files(job)["megatron.sh"])
    assert read_job("megatron", file).framework.cuda_graphs == graphs


def test_without_graphs_nothing_is_written() -> None:
    values = MEGATRON.write_arguments(megatron_job(cuda_graphs="none"))
    assert not {"cuda-graph-impl", "cuda-graph-scope", "te-rng-tracker"} & set(values)


def test_expandable_segments_keep_nccl_from_registering() -> None:
    assert (
        MEGATRON.write_arguments(megatron_job(cuda_graphs="te", allocator="expandable"))["$NCCL_GRAPH_REGISTER"] == "0"
    )


def test_bridge_has_them_in_its_provider_and_the_random_states_in_two_places() -> None:
    text = bridge_job_files(megatron_job("megatron-bridge", cuda_graphs="te:attn"))["mofa_recipe.py"]
    for line in ("cuda_graph_impl='transformer_engine'", "cuda_graph_scope=['attn']", "use_te_rng_tracker=True",
                 "rng=RNGConfig(", "te_rng_tracker=True", "    RNGConfig,"):  # fmt: skip
        assert line in text
    assert "RNGConfig" not in bridge_job_files(megatron_job("megatron-bridge", cuda_graphs="none"))["mofa_recipe.py"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--cuda-graph-impl local --cuda-graph-scope attn", r"cuda-graph-scope \(attn\) is not modelled"),
        ("--cuda-graph-impl other", r"cuda-graph-impl \(other\)"),
        ("--external-cuda-graph", "external-cuda-graph"),
    ],
)
def test_other_graphs_are_refused_by_name(more: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(BASE.replace("LAYERS=4\n", "") + more + "\n")
    with pytest.raises(SpecError, match=named):
        read_job("megatron", file)
