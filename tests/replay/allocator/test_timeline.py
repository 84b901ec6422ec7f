"""What a replay says of a peak: tensors by name, a curve over time, the out-of-memory instant."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import mofa
from mofa.plan.memory import MemoryCurve
from mofa.plan.result import Plan
from mofa.replay.allocator import timeline
from mofa.replay.allocator.timeline import ACTIVATIONS, GROUPS, OUTSIDE, Instruction, Journal
from mofa.report.figures.memory_over_time import plot_memory_over_time


@cache
def _plan(strategy: str = "pp=2 micro_batch=1 recompute=full", gpus: int = 8, batch: int = 64) -> Plan:
    job = mofa.load_workload("llama3-8b", global_batch=batch)
    return mofa.estimate(job, mofa.load_cluster("h100-hgx", gpus), strategy)


def test_estimates_are_replayed_unless_not_asked_for() -> None:
    job, machines = mofa.load_workload("llama3-8b", global_batch=64), mofa.load_cluster("h100-hgx", 8)
    closed = mofa.estimate(job, machines, "pp=2 recompute=full", replay=False)
    assert closed.costed_by == "closed_form"
    assert not closed.memory.by_stage[0].tensors and closed.memory.by_stage[0].curve is None
    assert _plan().costed_by == "replay"


def test_tensors_of_the_peak_sum_to_what_is_allocated() -> None:
    for stage in _plan().memory.by_stage:
        assert sum(t.bytes for t in stage.tensors) == stage.allocated_bytes
        named = [t.bytes for t in stage.tensors if t.name != "others"]
        assert named == sorted(named, reverse=True)
        for kind in {t.kind for t in stage.tensors}:
            assert sum(t.bytes for t in stage.tensors if t.kind == kind) == stage.by_component[kind]


def test_peaks_are_named() -> None:
    """The first stage peaks in a backward, the last where the loss has its fp32 logits; Adam's moments are two."""
    first, last = _plan().memory.by_stage
    assert first.instant is not None and first.instant.startswith("backward of block ")
    assert last.instant == "forward of the head: loss.cross_entropy"
    moments = {t.name: t.bytes for t in first.tensors if t.name.startswith("Adam's")}
    assert moments["Adam's first moments"] == moments["Adam's second moments"]


def test_weights_gradients_put_off_do_not_hold_the_loss() -> None:
    """PyTorch detaches the loss at the end of a backward by inputs: one micro-batch's logits are alive at the peak."""
    job = mofa.load_workload("llama3-8b", seq_len=4096, global_batch=16, overrides={"model.num_layers": 8})
    strategy = "pp=2 vpp=2 schedule=interleaved-zb micro_batch=1 recompute=none"
    plan = mofa.estimate(job, mofa.load_cluster("h200-hgx", 2), strategy, framework=mofa.load_framework("torchtitan"))
    last = plan.memory.by_stage[1]
    held = {t.name: t.bytes for t in last.tensors}
    assert "head" in (last.instant or "")
    assert held["loss.log_softmax"] == 4096 * 128_256 * 4


def test_curves_have_the_peak_and_the_whole_step() -> None:
    plan = _plan()
    for stage in plan.memory.by_stage:
        curve = stage.curve
        assert curve is not None
        total = np.sum([curve.kinds[name] for name in curve.kinds], axis=0)
        assert total[curve.peak] == total.max() == pytest.approx(stage.allocated_bytes, rel=0.01)
        assert list(curve.time_s) == sorted(curve.time_s)
        assert curve.time_s[0] == 0.0 and curve.time_s[-1] == pytest.approx(plan.step_s, rel=0.02)
        assert np.all(total <= np.array(curve.reserved_bytes))
        assert len(curve.time_s) <= 122


def test_the_label_of_the_peak_lies_above_all_lines() -> None:
    plan = _plan()
    for stage in (0, 1):
        ax = plot_memory_over_time(plan, stage)
        ax.figure.canvas.draw()
        (label,) = ax.texts
        highest = max(float(np.max(line.get_ydata())) for line in ax.lines)
        box = label.get_bbox_patch()
        assert box is not None and box.get_facecolor()[:3] == (1.0, 1.0, 1.0)  # covers the grid
        assert ax.transData.inverted().transform(box.get_window_extent().p0)[1] > highest


def test_a_curve_of_skipped_rounds_stays_high() -> None:
    """256 micro-batches of which most rounds are left out: the middle of the step is as full as its first part."""
    stage = _plan("pp=2 dp=1 micro_batch=1 recompute=full", 2, 256).memory.by_stage[0]
    curve = stage.curve
    assert curve is not None
    activations = np.array(curve.kinds["activations"])
    middle = (np.array(curve.time_s) > 0.3 * curve.time_s[-1]) & (np.array(curve.time_s) < 0.7 * curve.time_s[-1])
    assert activations[middle].max() == activations.max()


def test_a_plan_that_runs_out_says_where() -> None:
    memory = _plan("micro_batch=8 recompute=none", 8, 64).memory
    full = memory.by_stage[0].out_of_memory
    assert not memory.fits and full is not None
    assert full.step == 1 and " of block " in full.where and full.missing_bytes > 0
    assert sum(t.bytes for t in full.tensors) == full.allocated_bytes <= full.reserved_bytes
    assert full.reserved_bytes + full.missing_bytes < memory.capacity_bytes * 1.2
    assert memory.by_stage[0].allocated_bytes > full.allocated_bytes
    assert _plan().memory.by_stage[0].out_of_memory is None


def test_a_journal_by_hand() -> None:
    def instruction(name: str, group: int = ACTIVATIONS, code: int = OUTSIDE) -> Instruction:
        return Instruction(code, 0, 0, 0, group, name, f"op of {name}")

    journal = Journal(
        [instruction("a"), instruction("b"), instruction("a", code=0), instruction("a"), instruction("w", 0)],
        [512, 1024, 512, -512, 2048],
    )
    journal.new_passages.append((2, "forward", "block 3"))
    journal.steps.append(1)
    moment = journal.instant_at(2, 4096)
    assert [(t.name, t.count, t.bytes) for t in moment.tensors] == [("a", 2, 1024), ("b", 1, 1024)]
    assert (moment.where, moment.step, moment.allocated) == ("forward of block 3: op of a", 1, 2048)
    assert journal.instant_at(4, 4096).alive["parameters"] == 2048
    assert journal.allocated_bytes_from_event(3).tolist() == [1536, 3584]
    assert journal.live_bytes_by_group(np.array([4, 3]))[:, GROUPS.index("activations")].tolist() == [1536, 1536]
    assert journal.live_bytes_by_group(np.array([4, 3, 0]))[:, GROUPS.index("parameters")].tolist() == [2048, 0, 0]


def test_curves_whose_arrays_differ_in_length_are_refused() -> None:
    with pytest.raises(ValueError, match="number of instants"):
        MemoryCurve(time_s=(0.0, 1.0), reserved_bytes=(1.0,), kinds={"activations": (1.0, 1.0)}, peak=0)


def test_many_larger_blocks_change_events_as_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What blocks are larger than noted is added slot by slot where they are few, by arrays where they are many."""
    rng = np.random.default_rng(0)
    entries = {
        int(slot): tuple((int(event), int(rng.choice([-1, 1]))) for event in rng.integers(0, 200, 3))
        for slot in rng.permutation(90)[:80]
    }
    larger = [(200 * n, entries, {int(slot): int(rng.integers(1, 1 << 20)) for slot in range(100)}) for n in range(3)]
    both = np.zeros((2, 600), dtype=np.int64)
    timeline._add_larger(both[0], larger)
    monkeypatch.setattr(timeline, "MANY_RESTS", 1000)
    timeline._add_larger(both[1], larger)
    assert both.any() and np.array_equal(*both)
