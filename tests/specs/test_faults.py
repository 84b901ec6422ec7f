"""Fault profiles: every one loads, names its sources, and what is wrong is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mofa.errors import SpecError
from mofa.specs.base import Fact
from mofa.specs.faults import FaultSpec, PowerDrawSpec
from mofa.specs.files import bundled_names, load_yaml
from mofa.specs.load import load_faults

PRESETS = ("byterobust", "delta", "glm-65b", "llama3", "megascale", "rsc-1", "rsc-2")
DATA = Path(__file__).parents[2] / "fault_profiles"


def test_the_presets() -> None:
    assert bundled_names("fault_profiles") == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_where_its_numbers_come_from(name: str) -> None:
    spec = load_faults(name)
    assert spec.reliability is not None and spec.restart is not None
    facts = [fact for kind in spec.reliability.kinds for fact in (kind.share, kind.detect_s, kind.isolate_s)]
    facts += [getattr(spec.restart, field) for field in type(spec.restart).model_fields]
    assert spec.reliability.failures_per_node_day is not None
    for fact in [*facts, spec.reliability.failures_per_node_day]:
        assert isinstance(fact, Fact) and len(fact.source) > 8
    assert spec.price is None  # nobody publishes what GPUs cost them


@pytest.mark.parametrize(
    ("name", "per_thousand"),
    [("llama3", 3.79), ("rsc-1", 6.50), ("rsc-2", 2.34), ("byterobust", 1000 * 175 / 90 / 1200)],
)
def test_published_rates(name: str, per_thousand: float) -> None:
    reliability = load_faults(name).reliability
    assert reliability is not None and reliability.failures_per_node_day is not None
    assert 1000 * reliability.failures_per_node_day.value == pytest.approx(per_thousand, rel=2e-3)


@pytest.mark.parametrize(("name", "count", "node_days"), [("llama3", 419, 2048 * 54), ("byterobust", 175, 1200 * 90)])
def test_counts_behind_the_rates(name: str, count: int, node_days: float) -> None:
    reliability = load_faults(name).reliability
    assert reliability is not None and reliability.failures_per_node_day is not None
    assert reliability.counted_failures is not None and reliability.counted_failures.value == count
    assert reliability.failures_per_node_day.value == pytest.approx(count / node_days, rel=2e-3)


def test_llama_3_kinds_are_the_papers_table() -> None:
    reliability = load_faults("llama3").reliability
    assert reliability is not None
    counts = {kind.path: round(kind.share.value * 419) for kind in reliability.kinds}
    assert counts == {"node": 314, "network": 42, "process": 63}


def change(path: str, value: Any) -> FaultSpec:
    return load_faults("llama3", {path: value})


def fact(value: float) -> dict[str, object]:
    return {"value": value, "provenance": "assumed", "source": "a test"}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("reliability.failures_per_node_day", -1.0, "must be at least 0"),
        ("reliability.failures_per_node_day", 0.0, "must be at least 1e-09 / .*; leave reliability out"),
        ("reliability.failures_per_node_day", 1e-30, r"\(1e-30\) must be at least 1e-09"),
        ("reliability.shape", fact(0.0), "from 0.1 to 10"),
        ("reliability.counted_failures", 0.0, "at least 1"),
        ("reliability.lemon_fraction", fact(0.1), "give both or none"),
        (
            "reliability.components",
            [{"name": "GPU", "num_per_node": 8, "mttf_s": {**fact(0), "value": "0 s"}}],
            "one of",
        ),
        ("storage.write_bytes_per_s", "0 B/s", r"must be at least 1 and at most 1e\+33"),
        ("storage.write_bytes_per_s", "2 TB", "is no unit"),
        ("restart.repair_s", "-1 s", "must be at least 0"),
        ("checkpoint.mode", "sometimes", "must be"),
        ("checkpoint.interval_s", "0 s", "greater than or equal to"),
        ("checkpoint.copies", 1, "greater than or equal to 2"),
        ("spares", -1, "greater than or equal to 0"),
        ("price", {"usd_per_gpu_hour": fact(-2.0)}, "must be at least 0"),
        ("power", {"pue": fact(0.9)}, r"pue \(0.9\) must be from 1 to 10"),
        ("reliabilty", {}, "did you mean reliability"),
    ],
)
def test_what_is_wrong_is_refused(path: str, value: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        change(path, value)


def test_shares_must_sum_to_one(tmp_path: Path) -> None:
    text = (DATA / "rsc-1.yaml").read_text().replace("share: {value: 1,", "share: {value: 0.9,")
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"shares sum to 0\.9"):
        load_faults(tmp_path / "x.yaml")


def test_components_in_place_of_a_rate(tmp_path: Path) -> None:
    raw = load_yaml(DATA / "rsc-1.yaml")
    part = "{name: GPU, num_per_node: 8, mttf_s: {value: 50000 h, provenance: assumed, source: Epoch AI}}"
    lines = [line for line in (DATA / "rsc-1.yaml").read_text().splitlines() if "failures_per_node_day" not in line]
    at = lines.index("reliability:")
    (tmp_path / "x.yaml").write_text("\n".join([*lines[: at + 1], f"  components: [{part}]", *lines[at + 1 :]]))
    reliability = load_faults(tmp_path / "x.yaml").reliability
    assert reliability is not None and reliability.components[0].mttf_s.value == 50_000 * 3600.0
    assert "failures_per_node_day" in raw["reliability"]


@pytest.mark.parametrize("line", ["  process_s:", "  process_s: ~"])
def test_a_fact_without_a_value_is_said_to_be_empty(line: str, tmp_path: Path) -> None:
    lines = (DATA / "rsc-1.yaml").read_text().splitlines()
    (tmp_path / "x.yaml").write_text("\n".join(line if text.startswith("  process_s:") else text for text in lines))
    with pytest.raises(SpecError, match=r"x\.yaml: restart\.process_s is empty; write its value"):
        load_faults(tmp_path / "x.yaml")


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(SpecError, match=r"did you mean llama3\?"):
        load_faults("lama3")


def test_power_is_what_was_measured() -> None:
    power = PowerDrawSpec()
    assert power.idle_fraction.value < power.communication_fraction.value < power.memory_fraction.value
    assert power.matrix_fraction.provenance == "measured"
