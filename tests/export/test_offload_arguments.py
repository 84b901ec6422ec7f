"""Activations on the host in Megatron's words, both ways."""

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

ATTENTION = "core_attn+attn_proj"


def test_modules_are_written_and_come_back(tmp_path: Path) -> None:
    job = megatron_job(activation_offload=ATTENTION)
    values = MEGATRON.write_arguments(job)
    assert values["fine-grained-activation-offloading"] is True
    assert values["offload-modules"] == ["core_attn", "attn_proj"]
    file = tmp_path / "job.sh"
    file.write_text(megatron_job_files(job)["megatron.sh"])
    assert "export NVTE_CPU_OFFLOAD_V1=1" in file.read_text()
    assert read_job("megatron", file).framework.activation_offload == ATTENTION


def test_without_it_nothing_is_written() -> None:
    names = {"fine-grained-activation-offloading", "offload-modules", "$NVTE_CPU_OFFLOAD_V1"}
    assert not names & set(MEGATRON.write_arguments(megatron_job()))


def test_bridge_has_it_in_its_provider() -> None:
    text = bridge_job_files(megatron_job("megatron-bridge", activation_offload=ATTENTION))["mofa_recipe.py"]
    assert "fine_grained_activation_offloading=True" in text
    assert "offload_modules=['core_attn', 'attn_proj']" in text


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("", "without offload-modules"),
        ("--offload-modules attn_proj", "add core_attn"),
        ("--offload-modules mlp", "mlp is no module"),
        ("--offload-modules core_attn --min-offloaded-tensor-size 1024", "min-offloaded-tensor-size"),
    ],
)
def test_what_megatron_or_mofa_lacks_is_refused_by_name(more: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(BASE.replace("LAYERS=4\n", "") + f"--fine-grained-activation-offloading {more}\n")
    with pytest.raises(SpecError, match=named):
        read_job("megatron", file)


def test_a_job_that_megatron_would_stop_at_is_refused(tmp_path: Path) -> None:
    """It asserts the variable; a log, which holds no environment, is read without."""
    file = tmp_path / "job.sh"
    text = megatron_job_files(megatron_job(activation_offload=ATTENTION))["megatron.sh"]
    file.write_text(text.replace("export NVTE_CPU_OFFLOAD_V1=1", "export NVTE_CPU_OFFLOAD_V1=0"))
    with pytest.raises(SpecError, match=r"NVTE_CPU_OFFLOAD_V1 \(0\) is not 1"):
        read_job("megatron", file)
    file.write_text(text.replace("export NVTE_CPU_OFFLOAD_V1=1\n", ""))
    assert read_job("megatron", file).framework.activation_offload == ATTENTION


def test_modules_without_the_switch_say_nothing(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(BASE.replace("LAYERS=4\n", "") + "--offload-modules core_attn\n")
    assert read_job("megatron", file).framework.activation_offload == "none"
