"""An optimizer on hosts in Megatron's words, both ways."""

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

HALF = {"optimizer_offload": 0.5, "overlap_optimizer_copies": True, "host_threads": 12}


def test_shares_threads_and_copies_are_written_and_come_back(tmp_path: Path) -> None:
    job = megatron_job(**HALF)
    values = MEGATRON.write_arguments(job)
    assert values["optimizer-cpu-offload"] is True and values["optimizer-offload-fraction"] == 0.5
    assert values["overlap-cpu-optimizer-d2h-h2d"] is True and values["use-precision-aware-optimizer"] is True
    file = tmp_path / "job.sh"
    file.write_text(megatron_job_files(job)["megatron.sh"])
    assert "export OMP_NUM_THREADS=12" in file.read_text()
    framework = read_job("megatron", file).framework
    assert {name: getattr(framework, name) for name in HALF} == HALF


def test_without_it_nothing_is_written() -> None:
    names = {"optimizer-cpu-offload", "optimizer-offload-fraction", "overlap-cpu-optimizer-d2h-h2d", "$OMP_NUM_THREADS"}
    assert not names & set(MEGATRON.write_arguments(megatron_job()))


def test_bridge_has_it_in_its_optimizer() -> None:
    text = bridge_job_files(megatron_job("megatron-bridge", **HALF))["mofa_recipe.py"]
    for line in ("optimizer_cpu_offload=True", "optimizer_offload_fraction=0.5", "overlap_cpu_optimizer_d2h_h2d=True",
                 "use_precision_aware_optimizer=True"):  # fmt: skip
        assert line in text


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--optimizer-cpu-offload --use-distributed-optimizer", "without use-precision-aware-optimizer"),
        ("--use-precision-aware-optimizer", "are not modelled"),
        ("--use-torch-optimizer-for-cpu-offload", "use-torch-optimizer-for-cpu-offload"),
    ],
)
def test_what_megatron_or_mofa_lacks_is_refused_by_name(more: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(BASE.replace("LAYERS=4\n", "") + more + "\n")
    with pytest.raises(SpecError, match=named):
        read_job("megatron", file)


def test_a_job_of_somebody_takes_all_states_by_default(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    more = "--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer"
    file.write_text(BASE.replace("LAYERS=4\n", "") + more + "\n")
    framework = read_job("megatron", file).framework
    assert (framework.optimizer_offload, framework.host_threads) == (1.0, 1)
