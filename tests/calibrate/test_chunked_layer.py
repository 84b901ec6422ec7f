"""The chunked MoE layer: prescribed loads, its tape by hand, and what chunks do to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mofa.blocks.backward import derived_backward_tape
from mofa.blocks.chunks import split_into_token_chunks
from mofa.blocks.op import Tape
from mofa.blocks.recomputation import Recompute
from mofa.blocks.work import Collective, GroupedGemm
from mofa.calibrate.cases import Sample, Shape
from mofa.calibrate.chunked_check import MeasuredAndPredictedLayer, predict_measured_layers, summarise_layer_errors
from mofa.calibrate.chunked_layer import REGION, layer_forward_tape, predict_bench_layer, static_tensor_bytes
from mofa.calibrate.measurements import append_row, read_rows_of_file
from mofa.calibrate.shapes.chunked import OPS, chunked_layer_cases, token_copies_by_expert_of_rank, token_rows_by_rank
from mofa.errors import SpecError
from mofa.specs.load import load_cluster, load_framework

SHAPE: Shape = {"tokens": 16384, "hidden": 2048, "ffn": 768, "experts": 128, "top_k": 8, "ep": 2, "chunks": 1,
                "skew": "0.0"}  # fmt: skip


@pytest.mark.parametrize("skew", ["0.0", "0.25", "1.0", "3.0"])
def test_no_expert_gets_a_token_twice_and_none_is_lost(skew: str) -> None:
    loads = token_copies_by_expert_of_rank(4096, 8, 64, float(skew))
    assert sum(loads) == 4096 * 8
    assert max(loads) <= 4096
    assert loads == sorted(loads, reverse=True)


def test_rows_of_ranks_by_hand() -> None:
    """Balanced: 16,384 tokens, 8 copies, on each of two ranks from two ranks; skewed: all of them, more first."""
    assert token_rows_by_rank(SHAPE) == [131072, 131072]
    first, second = token_rows_by_rank({**SHAPE, "skew": "1.0"})
    assert first + second == 2 * 131072
    assert first > 1.7 * 131072


def tapes(shape: Shape) -> tuple[Tape, Tape]:
    forward = split_into_token_chunks(layer_forward_tape(shape), int(shape["chunks"]))
    only = Recompute("regions", checkpoint=frozenset({REGION}))
    return forward, derived_backward_tape(forward, only if shape["chunks"] == 1 else Recompute())


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_flops_are_forward_again_and_twice_back(chunks: int) -> None:
    """Three matrices of hidden x ffn an expert: 6 FLOP a row, once forward, once again, twice back."""
    forward, back = tapes({**SHAPE, "chunks": chunks})
    rows = token_rows_by_rank(SHAPE)[0]
    flops = sum(float(op.work.flops) for op in (*forward.ops, *back.ops) if isinstance(op.work, GroupedGemm))
    assert flops == pytest.approx(4 * 6 * rows * 2048 * 768)


@pytest.mark.parametrize("chunks", [1, 4])
def test_exchanges_of_rows(chunks: int) -> None:
    """Dispatch and combine of each chunk forward, again, and back; the counts forward and again."""
    forward, back = tapes({**SHAPE, "chunks": chunks})
    sent = [op for op in (*forward.ops, *back.ops) if isinstance(op.work, Collective)]
    counts = [op for op in sent if "counts" in op.name]
    assert (len(sent) - len(counts), len(counts)) == (6 * chunks, 2 * chunks)
    rows = sum(float(op.work.payload) for op in sent if isinstance(op.work, Collective) and op not in counts)
    assert rows == pytest.approx(6 * 16384 * 8 * 2048 * 2)


def test_no_exchange_on_one_rank() -> None:
    forward, _ = tapes({**SHAPE, "ep": 1})
    assert not any(isinstance(op.work, Collective) for op in forward.ops)


def test_weights_and_main_gradients_by_hand() -> None:
    """64 experts a rank of 3 x 2048 x 768: 2 bytes a weight, 4 a main gradient."""
    tensors = static_tensor_bytes(SHAPE)
    params = 64 * 3 * 2048 * 768
    assert tensors["w1"] + tensors["w2"] == 2 * params
    assert tensors["grad1"] + tensors["grad2"] == 4 * params


def test_chunks_save_memory_and_cost_time() -> None:
    """On a host that is ahead: a slower one is later where forward and backward begin without a lead each."""
    cluster, framework = load_cluster("h200-hgx", 2).with_host_speed(5.4e-6), load_framework("torchtitan")
    found = [predict_bench_layer({**SHAPE, "chunks": c, "skew": "0.5"}, cluster, framework) for c in (1, 2, 4, 8)]
    peaks, steps = [p.peak_bytes - p.static_bytes for p in found], [p.step_s for p in found]
    assert peaks == sorted(peaks, reverse=True)
    assert steps == sorted(steps)
    assert all(p.reserved_bytes >= p.peak_bytes * 0.999 for p in found)
    assert all(p.step_s == pytest.approx(p.forward_s + p.backward_s, rel=0.05) for p in found)
    # the rows of all tokens but a chunk's are gone: at least those that every chunk has on its way back
    assert peaks[0] - peaks[1] > 0.4 * peaks[0]


def test_a_skew_costs_memory_and_time() -> None:
    cluster, framework = load_cluster("h200-hgx", 2), load_framework("torchtitan")
    even, uneven = (predict_bench_layer({**SHAPE, "skew": s}, cluster, framework) for s in ("0.0", "1.0"))
    assert uneven.step_s > 1.3 * even.step_s
    assert uneven.peak_bytes > 1.1 * even.peak_bytes


def write(folder: Path, *, ops: tuple[str, ...] = OPS[1:], factor: float = 1.0) -> None:
    """A folder with one layer, each quantity the prediction times a factor."""
    case = replace(next(c for c in chunked_layer_cases(2) if c.shape_size("chunks") == 2))
    machines = load_cluster("h200-hgx", 2).on_hosts("shared")
    said = predict_bench_layer(case.shape, machines, load_framework("torchtitan"))
    names = {"step": "step_s", "forward": "forward_s", "backward": "backward_s"}
    folder.mkdir(exist_ok=True)
    for op in ops:
        value = factor * float(getattr(said, names.get(op, op)))
        append_row(folder, replace(case, op=op), Sample(value, value, value, 5), "NVIDIA H200", "host-0")


def test_scores_and_interrupted_layers(tmp_path: Path) -> None:
    write(tmp_path / "whole", factor=1.25)
    write(tmp_path / "cut", ops=OPS[1:-1])
    (score,) = predict_measured_layers([tmp_path / "whole", tmp_path / "cut", tmp_path])
    assert {q: round(score.relative_error(q), 4) for q in score.values} == dict.fromkeys(score.values, -0.2)
    name, number, errors = summarise_layer_errors([score])[0]
    assert (name, number, round(errors["peak_bytes"], 4)) == ("all", 1, 0.2)


def test_a_layer_is_predicted_on_its_own_host(tmp_path: Path) -> None:
    """The speed measured beside it goes before its machine's, that before the profile's; a host that waits less."""
    case = next(
        c
        for c in chunked_layer_cases(2)
        if c.shape_size("chunks") == 8 and c.split == "fresh" and c.shape_size("ffn") == 1024
    )
    for op in OPS[1:]:
        append_row(tmp_path, replace(case, op=op), Sample(1.0, 1.0, 1.0, 5), "NVIDIA H200", "host-0")
    steps = [
        predict_measured_layers([tmp_path], hosts=hosts)[0].values["step"][1] for hosts in (None, {"host-0": 2e-5})
    ]
    append_row(tmp_path, replace(case, op=OPS[0]), Sample(4e-5, 4e-5, 4e-5, 5), "NVIDIA H200", "host-0")
    steps.append(predict_measured_layers([tmp_path], hosts={"host-0": 2e-5})[0].values["step"][1])
    assert steps[0] < steps[1] < 0.6 * steps[2]
    assert predict_measured_layers([tmp_path], split="heldout") == []


def test_groups_tell_the_two_sets_apart() -> None:
    shape: Shape = {"hidden": 64, "ep": 2, "chunks": 4, "skew": "0.0"}
    scores = [MeasuredAndPredictedLayer("a", shape, {"step": (1.0, 1.1)}, s) for s in ("heldout", "fresh")]
    assert [name for name, _, _ in summarise_layer_errors(scores)][:3] == [
        "all",
        "first set, 2 ranks",
        "second set, 2 ranks",
    ]
    assert not any("set" in name for name, _, _ in summarise_layer_errors(scores[:1]))


def test_bytes_are_read_back_exactly_and_units_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, ops=("peak_bytes",))
    path = tmp_path / "chunked_moe.csv"
    (row,) = read_rows_of_file(path)
    assert row.sample.median_s > 1e9
    path.write_text(path.read_text(encoding="utf-8").replace(",B,", ",us,"), encoding="utf-8")
    with pytest.raises(SpecError, match="line 2: unit 'us' instead of 'B'"):
        read_rows_of_file(path)
