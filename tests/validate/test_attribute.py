"""A profiled step beside its prediction: families by name, traces of both kinds, what cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import mofa
from mofa.errors import SpecError
from mofa.search.one_plan import plan_with_replayed_time
from mofa.validate.attribute import (
    TracedKernel,
    attribute_step,
    device_busy_s,
    kernel_family,
    read_profile,
    read_trace,
    refuse_trace_of_another_run,
    trace_mismatches,
)
from mofa.validate.reference import ReferenceRun, reference_of_file

REFERENCES = Path(__file__).parents[2] / "reference_runs"
TRACES = sorted((REFERENCES / "traces").glob("*.0.json.gz"))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize32x64x8", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void flash_fwd_kernel", "attention"),
        ("_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversal",
         "grouped_gemm"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<", "optimizer"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void cunn_SoftMaxForward<4, float, float, float", "memory_bound"),
        ("Memcpy DtoD (Device -> Device)", "memory_bound"),
    ],
)  # fmt: skip
def test_families(name: str, family: str) -> None:
    assert kernel_family(name) == family


def test_overlapped_kernels_are_busy_once() -> None:
    """[0, 3] and [1, 2] on two streams, then [5, 6]: 4 s of 6."""
    assert (
        device_busy_s([TracedKernel(0, "a", 0.0, 3.0), TracedKernel(1, "b", 1.0, 1.0), TracedKernel(0, "c", 5.0, 1.0)])
        == 4.0
    )


def test_a_chrome_trace(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "nvjet", "ts": 10.0, "dur": 5.0, "tid": 7},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 50.0, "tid": 1},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 2.0, "dur": 1.0, "tid": 7},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert [(k.name, k.stream) for k in read_trace(path)] == [("Memcpy DtoD", 7), ("nvjet", 7)]
    zipped = tmp_path / "trace.json.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(zipped) == read_trace(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "JSON"), (b"[]", "no object"), (b"{}", "no trace"), (b'{"traceEvents": []}', "no kernel"),
     (b'{"kernels_us": [[1]]}', "no trace"), (b"\x1f\x8b broken", "no whole file of gzip")],
)  # fmt: skip
def test_what_is_no_trace(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=words):
        read_trace(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        read_trace(tmp_path / "none.json")


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name.split(".")[0])
def test_every_kept_trace(trace: Path, tmp_path: Path) -> None:
    """All seconds of the trace are in a family, and the products are near what is predicted for them."""
    profile, run = read_profile(trace), _recorded(trace.name.split(".")[0], tmp_path)
    kernels = profile.kernels
    workload, cluster, framework, strategy = run.resolved_specs()
    plan = plan_with_replayed_time(workload, cluster, strategy, framework=framework)
    found = attribute_step(kernels, plan)
    refuse_trace_of_another_run(trace, profile, cluster.num_gpus, run.id, run.gpu)
    assert not trace_mismatches(profile, found)
    running = [item for item in found.families if item.family != "host_idle"]
    assert sum(item.measured_s for item in running) == pytest.approx(sum(k.duration_s for k in kernels))
    assert sum(item.kernels for item in running) == len(kernels)
    idle = next(item for item in found.families if item.family == "host_idle")
    assert idle.measured_s == pytest.approx(found.measured_step_s - device_busy_s(kernels))
    assert found.bubble_s == 0 or strategy.pp > 1


def _recorded(name: str, scratch: Path) -> ReferenceRun:
    places = (REFERENCES / "measured", REFERENCES / "switches" / "measured")
    path = next(folder / f"{name}.yaml" for folder in places if (folder / f"{name}.yaml").exists())
    found = reference_of_file(path, scratch)
    assert found is not None
    return found


def test_a_trace_of_another_run_is_told(tmp_path: Path) -> None:
    """By its name it is refused, by the seconds of its products doubted; of the run's own trace nothing is said."""
    run = _recorded("tt1-llama-2l-traced", tmp_path)
    workload, cluster, framework, strategy = run.resolved_specs()
    plan = mofa.estimate(workload, cluster, strategy, framework=framework, replay=False)
    own, other = (REFERENCES / "traces" / f"{name}.0.json.gz" for name in (run.id, "tt1-qwen06b-host-bound-traced"))
    refuse_trace_of_another_run(own, read_profile(own), 1, run.id, run.gpu)
    assert not trace_mismatches(read_profile(own), attribute_step(read_profile(own).kernels, plan))
    with pytest.raises(SpecError, match=r"traced\.0\.json\.gz: is named after run tt1-qwen06b.*, the run is tt1-llama"):
        refuse_trace_of_another_run(other, read_profile(other), 1, run.id, run.gpu)
    (said,) = trace_mismatches(read_profile(other), attribute_step(read_profile(other).kernels, plan))
    assert "products and attention" in said


def test_what_a_chrome_trace_says_of_its_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    marks = [{"cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": 0.0, "dur": 1.0} for i in (3, 3, 4)]
    kernel = {"cat": "kernel", "name": "nvjet", "ts": 10.0, "dur": 5.0, "tid": 7}
    content = {"deviceProperties": [{"id": 0, "name": "NVIDIA A100"}], "distributedInfo": {"rank": 0, "world_size": 64}}
    path.write_text(json.dumps({**content, "traceEvents": [*marks, kernel]}))
    profile = read_profile(path)
    assert (profile.gpu, profile.world_size, profile.steps) == ("NVIDIA A100", 64, 2)
    plan = mofa.estimate(
        mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8), "tp=2 micro_batch=1", replay=False
    )
    assert any("2 marked steps" in line for line in trace_mismatches(profile, attribute_step(profile.kernels, plan)))
    for gpus, words in ((8, "is of 64 ranks, the run of 8"), (64, "is of 'NVIDIA A100', the run of 'NVIDIA H100")):
        with pytest.raises(SpecError, match=words):
            refuse_trace_of_another_run(path, profile, gpus, "other", "NVIDIA H100 80GB HBM3")
    refuse_trace_of_another_run(path, profile, 64, "other", None)
    path.write_text(json.dumps({"deviceProperties": [7], "distributedInfo": 3, "traceEvents": [kernel]}))
    assert read_profile(path).world_size is None and read_profile(path).steps == 1
