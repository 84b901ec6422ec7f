"""What a plan's notes say of the sizes of its matrix products."""

from __future__ import annotations

import pytest

import mofa
from mofa.plan.result import Estimate
from mofa.specs.load import bundled_names
from mofa.specs.residuals import load_closed_form_residuals

LLAMA = "llama3-8b"


def estimated(name: str, framework: str = "megatron", tp: int = 1, **changes: object) -> Estimate:
    job = mofa.load_workload(name, overrides={path.replace("__", "."): value for path, value in changes.items()})
    cluster = mofa.load_cluster("h100-hgx", 64)
    strategy = {"tp": tp, "dp": 64 // tp, "micro_batch": 1}
    return mofa.estimate(job, cluster, strategy, framework=mofa.load_framework(framework), replay=False)


def alignment(estimate: Estimate) -> list[str]:
    return [note for note in estimate.notes if "no multiple of 16 bytes" in note]


@pytest.mark.parametrize(
    ("framework", "tp", "changes", "says"),
    [
        ("megatron", 1, {"model__hidden": 4097}, ": 4097 of qkv, proj, mlp.fc1, mlp.fc2, output;"),
        # 14344 is 8 x 1793; a quarter of it, and of gate and up together, is not
        ("megatron", 1, {"model__mlp__ffn_hidden": 14344}, None),
        ("megatron", 4, {"model__mlp__ffn_hidden": 14344}, ": 3586 of mlp.fc2; 7172 of mlp.fc1;"),
        # Megatron pads the vocabulary to a multiple of 128, torchtitan does not
        ("megatron", 1, {"model__vocab": 50257}, None),
        ("torchtitan", 1, {"model__vocab": 50257}, ": 50257 of output;"),
        # products of unfused attention are predicted as measured
        ("megatron-local", 1, {"model__attention__head_dim": 108}, None),
    ],
)
def test_sizes_that_tensor_cores_are_slow_on_are_named(
    framework: str, tp: int, changes: dict[str, object], says: str | None
) -> None:
    notes = alignment(estimated(LLAMA, framework, tp, **changes))
    assert len(notes) == (0 if says is None else 1)
    if says is not None:
        assert says in notes[0]
        assert "3 to 8 times as long" in notes[0]


@pytest.mark.parametrize("name", bundled_names("workloads"))
def test_bundled_models_have_none_of_them(name: str) -> None:
    assert alignment(estimated(name)) == []


def test_options_that_no_run_has_shown_say_so() -> None:
    """Overlap under tensor parallelism, and DeepEP with the source of its rate; nothing without them."""
    job, h800 = mofa.load_workload("qwen3-30b-a3b"), mofa.load_cluster("h800-hgx", 16)

    def notes(strategy: str) -> list[str]:
        found = mofa.estimate(job, h800, strategy, replay=False).notes
        return [note for note in found if note.startswith(("tp_overlap", "dispatcher"))]

    both = notes("tp=2 ep=8 tp_overlap=true dispatcher=deepep")
    assert len(both) == 2 and "published rows" in both[0] and "DeepEP" in both[1]
    assert notes("tp=1 ep=8 tp_overlap=true") == notes("tp=2 ep=8") == []


def test_a_closed_form_leaves_free_what_only_a_replay_knows() -> None:
    """Beside the measured margin, what a replay may reserve beyond it on random jobs; a replay needs none."""
    job, machines = mofa.load_workload("llama3-8b", global_batch=16), mofa.load_cluster("h100-hgx", 8)
    closed, played = (
        mofa.estimate(job, machines, "tp=2 micro_batch=1 recompute=full", replay=replay) for replay in (False, True)
    )
    doubt = load_closed_form_residuals().reserved_memory_residual("megatron", 1)
    more = closed.memory.margin_bytes - played.memory.margin_bytes
    assert more == pytest.approx(doubt.value * closed.memory.reserved_bytes)
    assert [doubt.source in note for note in closed.notes].count(True) == 1
    assert not any(doubt.source in note for note in played.notes)
