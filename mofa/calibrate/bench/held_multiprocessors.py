"""Layers beside a kernel that holds multiprocessors and waits, as NCCL does between nodes, or copies slowly."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

from mofa.calibrate.bench.dense_layer import dense_layer_call
from mofa.calibrate.bench.torch_timing import Call, GpuMonitor, median_and_percentiles
from mofa.calibrate.cases import Case, Sample, UnsupportedCase, UnsupportedFamily
from mofa.calibrate.shapes.collective import TIMED_BESIDE_HELD

THREADS, SHARED_BYTES = 640, 180 * 1024
"""Of a block: with so much shared memory it has a multiprocessor to itself. [threads] and [B]"""
MOST_HELD_NS = 50_000_000
"""After which the kernel ends whatever it was told, so that no mistake hangs the GPU. [ns]"""
VECTORS = 4
"""Loads of 16 bytes that a thread copies at once, before it waits for its rate. [-]"""
PIECE_BYTES = THREADS * VECTORS * 16
"""What a block copies at once. [B]"""
BUFFER_PIECES = 2**28 // PIECE_BYTES
"""Of what is copied: several times the L2. [-]"""
LEAST_RATE = 0.9
"""Of the rate that was told; a slower copy says nothing of that rate. [-]"""
LAYERS = 2
"""Timed in a row. Multiprocessors are held for half of their time: for all of the first layer, forward and back."""
REPEATS = 3
"""Runs alone and beside, in turn; rows hold the medians. [-]"""
REST_S = 0.03
"""Idle before each run, which leaves the clock high. [s]"""
ISSUE_CYCLES, START_CYCLES = 16_000_000, 100_000
"""For which the device waits while the host issues, and while the kernel takes its multiprocessors. [cycles]"""
TOLD_NS, PIECE_NS, SOURCE, TARGET, START, END, COPIED, LAYERS_START, LAYERS_END = range(9)
"""What the words of the device's tensor hold: what the kernel is told, what it tells, what is written around layers."""
NUM_WORDS = LAYERS_END + 1

CUDA_SOURCE = f"""
#define MOST_HELD_NS {MOST_HELD_NS}LL
#define VECTORS {VECTORS}
#define BUFFER_PIECES {BUFFER_PIECES}LL

__device__ __forceinline__ long long now_ns() {{
    long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}}

extern "C" __global__ void write_time(long long* ns) {{ *ns = now_ns(); }}

// No barriers: each thread waits and copies by itself, so that none waits for another beyond the limit.
extern "C" __global__ void hold(long long* words) {{
    const long long start = now_ns();
    if (threadIdx.x == 0 && blockIdx.x == 0) words[{START}] = start;
    const long long until = start + (words[{TOLD_NS}] < MOST_HELD_NS ? words[{TOLD_NS}] : MOST_HELD_NS);
    const long long piece_ns = words[{PIECE_NS}];
    if (piece_ns > 0) {{
        const int4* source = (const int4*)words[{SOURCE}];
        int4* target = (int4*)words[{TARGET}];
        long long pieces = 0;
        while (now_ns() < until) {{
            const long long piece = (blockIdx.x + pieces * gridDim.x) % BUFFER_PIECES;
            const long long first = piece * VECTORS * blockDim.x + threadIdx.x;
            int4 loaded[VECTORS];
            #pragma unroll
            for (int i = 0; i < VECTORS; i++) loaded[i] = source[first + i * blockDim.x];
            #pragma unroll
            for (int i = 0; i < VECTORS; i++) target[first + i * blockDim.x] = loaded[i];
            pieces++;
            const long long due = start + pieces * piece_ns;
            while (now_ns() < (due < until ? due : until)) {{}}
        }}
        if (threadIdx.x == 0) atomicAdd((unsigned long long*)&words[{COPIED}], (unsigned long long)pieces);
    }}
    while (now_ns() < until) {{}}
    if (threadIdx.x == 0 && blockIdx.x == 0) words[{END}] = now_ns();
}}
"""


class Kernels(NamedTuple):
    """The kernel that holds multiprocessors, and one that writes the time; both run on the device's global timer."""

    hold: Any
    write_time: Any


class TimedRun(NamedTuple):
    """One run of the layers."""

    layers_s: float
    held_s: float
    """For how long the kernel held its multiprocessors while the layers ran; 0 without it. [s]"""
    copied_bytes_per_s: float


class LayersBesideHeldMultiprocessors:
    """Times layers alone and beside the kernel, in turn. The rows of a shape come from the same runs."""

    def __init__(self, clock: GpuMonitor) -> None:
        self._clock = clock
        self._kernels: Kernels | None = None
        self._layer: tuple[tuple[int, int, int], Call, float] | None = None
        self._samples: tuple[tuple[str, str], dict[str, Sample]] | None = None

    def sample(self, case: Case) -> Sample:
        """The row of a case; the first of a shape measures its others too.

        Raises
        ------
        UnsupportedCase
            Of a number of multiprocessors that the GPU does not have, or of a copy that falls behind its rate.
        UnsupportedFamily
            Where this torch compiles no kernels, or no block can fill a multiprocessor of this GPU.
        """
        key = case.op, case.shape_text
        if self._samples is None or self._samples[0] != key:
            self._samples = key, self._measure(case)
        return self._samples[1][case.variant]

    def _measure(self, case: Case) -> dict[str, Sample]:
        if self._kernels is None:
            self._kernels = compiled_kernels()
        number, available = case.shape_size("multiprocessors"), _num_multiprocessors()
        if number >= available:
            raise UnsupportedCase(f"{number} multiprocessors cannot be held of {available}")
        compute, layers_s = self._layer_and_seconds(case, self._kernels)
        rate = case.shape_size("bytes_per_s") if case.op == "copy" else 0
        source = torch.randn(BUFFER_PIECES * PIECE_BYTES // 2 if rate else 1, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(source)
        words = [0] * NUM_WORDS
        words[TOLD_NS] = min(round(layers_s / 2 * 1e9), MOST_HELD_NS)
        words[PIECE_NS] = round(PIECE_BYTES * number / rate * 1e9) if rate else 0
        words[SOURCE], words[TARGET] = source.data_ptr(), target.data_ptr()
        alone, beside = [], []
        for _ in range(REPEATS):
            alone.append(_run(self._kernels, compute, 0, words))
            beside.append(_run(self._kernels, compute, number, words))
        copied_bytes_per_s = statistics.median(run.copied_bytes_per_s for run in beside)
        if copied_bytes_per_s < LEAST_RATE * rate:
            raise UnsupportedCase(f"{number} multiprocessors copy {copied_bytes_per_s:.3g} B/s, not {rate:.3g}")
        times = [run.layers_s for run in alone], [run.layers_s for run in beside], [run.held_s for run in beside]
        reading = self._clock.sm_clock_and_power()
        return {
            variant: median_and_percentiles(values, *reading)
            for variant, values in zip(TIMED_BESIDE_HELD, times, strict=True)
        }

    def _layer_and_seconds(self, case: Case, kernels: Kernels) -> tuple[Call, float]:
        """The layer of a case's sizes, warm, and what :data:`LAYERS` of it take. [s]"""
        sizes = case.shape_size("m"), case.shape_size("n"), case.shape_size("k")
        if self._layer is None or self._layer[0] != sizes:
            self._layer = None  # its weights leave before others come
            compute = dense_layer_call(*sizes, torch.device("cuda"))
            runs = [_run(kernels, compute, 0, [0] * NUM_WORDS) for _ in range(3)]
            self._layer = sizes, compute, runs[-1].layers_s
        return self._layer[1:]


def compiled_kernels() -> Kernels:
    """The kernels, compiled for this GPU and run once.

    Raises
    ------
    UnsupportedFamily
        Where this torch compiles no kernels, or a block may have too little shared memory to fill a multiprocessor.
    """
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        raise UnsupportedFamily(f"torch {torch.__version__} has no torch.cuda._compile_kernel; 2.11 has")
    available = getattr(
        torch.cuda.get_device_properties(torch.cuda.current_device()), "shared_memory_per_block_optin", 0
    )
    if available < SHARED_BYTES:
        raise UnsupportedFamily(
            f"a block has at most {available} B of shared memory here; to fill a multiprocessor takes {SHARED_BYTES}"
        )
    try:
        kernels = Kernels(*(compile_kernel(CUDA_SOURCE, name) for name in Kernels._fields))
        kernels.hold.set_shared_memory_config(SHARED_BYTES)
        words = torch.zeros(NUM_WORDS, dtype=torch.int64, device="cuda")
        _launch_hold(kernels, 1, words, torch.cuda.current_stream())
        kernels.write_time(args=[words])
        torch.cuda.synchronize()
    except (RuntimeError, OSError, ImportError, AttributeError) as error:
        raise UnsupportedFamily(f"no kernel can be compiled: {str(error).splitlines()[0][:120]}") from error
    return kernels


def _num_multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def _launch_hold(kernels: Kernels, number: int, words: torch.Tensor, stream: Any) -> None:
    """Hold so many multiprocessors. Whatever the kernel is told is in ``words``: numbers as arguments are misread."""
    kernels.hold(grid=(number, 1, 1), block=(THREADS, 1, 1), args=[words], shared_mem=SHARED_BYTES, stream=stream)


def _run(kernels: Kernels, compute: Call, number: int, instructions: list[int]) -> TimedRun:
    """Run the layers once, beside a kernel that holds ``number`` multiprocessors; 0 is without it.

    The kernel starts before the layers, which would leave it none. Seconds are the device's global timer's.
    """
    words = torch.tensor(instructions, dtype=torch.int64, device="cuda")
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    time.sleep(REST_S)
    torch.cuda._sleep(ISSUE_CYCLES)
    if number:
        side.wait_stream(main)
        _launch_hold(kernels, number, words, side)
    torch.cuda._sleep(START_CYCLES)
    kernels.write_time(args=[words[LAYERS_START:]])
    for _ in range(LAYERS):
        compute()
    kernels.write_time(args=[words[LAYERS_END:]])
    torch.cuda.synchronize()
    answers = words.tolist()
    begin, finish = answers[LAYERS_START], answers[LAYERS_END]
    start, end = answers[START], answers[END]
    held_ns = max(0, min(finish, end) - max(begin, start)) if number else 0
    bytes_per_s = answers[COPIED] * PIECE_BYTES / max(end - start, 1) * 1e9
    return TimedRun((finish - begin) / 1e9, held_ns / 1e9, bytes_per_s)
