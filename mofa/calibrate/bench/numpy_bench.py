"""The bench on the host, with NumPy: the same interface, so that everything but the timing is tested anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mofa.calibrate.cases import Case, Sample, UnsupportedCase

MAX_ELEMENTS = 2**20


class NumpyBench:
    """Times small products and copies on the host; larger cases and device-only ones are unsupported."""

    gpu = "cpu"

    def __init__(self, *, samples: int = 3) -> None:
        self.samples = samples
        self._random = np.random.default_rng(0)

    def time_case(self, case: Case) -> Sample:
        """Median of a few calls. [s]"""
        call = self._call(case)
        times = []
        for _ in range(self.samples):
            before = time.perf_counter()
            call()
            times.append(max(time.perf_counter() - before, 1e-9))
        times.sort()
        return Sample(times[len(times) // 2], times[0], times[-1], len(times))

    def environment(self) -> dict[str, object]:
        """The device and the version of NumPy."""
        return {"gpu": self.gpu, "device": "cpu", "numpy": np.__version__}

    def _call(self, case: Case) -> Callable[[], Any]:
        if case.family == "gemm":
            m, n, k = (case.shape_size(x) for x in "mnk")
            a, b = self._values(m, k), self._values(k, n)
            return lambda: a @ b
        if case.family == "memory_bound" and "tokens" in case.shape:
            x = self._values(case.shape_size("tokens"), case.shape_size("width"))
            return lambda: x + x
        if case.family == "copy" and case.op == "device_copy":
            data = self._values(max(1, case.shape_size("bytes") // 4))
            return data.copy
        if case.family == "host" and case.op == "eager_add":
            small = self._values(16)
            return lambda: small + small
        raise UnsupportedCase(f"the NumPy bench has no {case.family} {case.op}")

    def _values(self, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        if np.prod(shape) > MAX_ELEMENTS:
            raise UnsupportedCase(f"{shape} is too large for the NumPy bench")
        return self._random.standard_normal(shape, dtype=np.float32)
