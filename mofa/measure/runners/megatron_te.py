"""One rank of a Megatron-Core run on its layer spec of Transformer Engine."""

from __future__ import annotations

import importlib.metadata

from mofa.measure.runners import wgrad_stand_in  # before Megatron-Core, which looks for Apex's kernel once
from mofa.measure.runners.common import measure_one_rank
from mofa.measure.runners.megatron import build_megatron_training

if __name__ == "__main__":
    assert wgrad_stand_in.NAME
    core, engine = importlib.metadata.version("megatron-core"), importlib.metadata.version("transformer-engine")
    measure_one_rank(
        build_megatron_training,
        f"{core} on Transformer Engine {engine}, its general_gemm(accumulate=True) for Apex's weight gradient",
    )
