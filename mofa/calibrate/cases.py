"""What is measured: one `Case` per timing, and the models whose shapes the held-out cases take.

Plain Python, so that it runs on a machine that has torch and nothing else of mofa's needs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Shape = dict[str, int | str]
Split = Literal["grid", "heldout", "fresh"]
"""What a fit may see; what scores it; what scores it again, drawn after the forms were chosen."""
SPLITS: tuple[Split, ...] = ("grid", "heldout", "fresh")
SEED = 20261121
FRESH_SEED = 20261205
"""Of the second held-out set, which nobody looked at while the forms were chosen."""


@dataclass(frozen=True)
class Case:
    """One thing to time: which operation, on what exact shape, and whether a fit may see it."""

    family: str
    op: str
    variant: str
    dtype: str
    split: Split
    shape: Shape = field(hash=False)

    def shape_size(self, name: str) -> int:
        """A whole number of the shape."""
        return int(self.shape[name])

    @property
    def shape_text(self) -> str:
        """The shape as the CSV holds it.

        Examples
        --------
        >>> Case("gemm", "fwd", "cublas", "bf16", "grid", {"m": 4096, "n": 512, "k": 64}).shape_text
        'm=4096 n=512 k=64'
        """
        return " ".join(f"{name}={value}" for name, value in self.shape.items())

    @property
    def identity(self) -> tuple[str, str, str, str, str]:
        """What tells one case from another, whichever split it belongs to."""
        return self.family, self.op, self.variant, self.dtype, self.shape_text


@dataclass(frozen=True)
class Sample:
    """One timing: the median of several samples and their spread, with clock and power where they could be read."""

    median_s: float
    low_s: float
    high_s: float
    num_samples: int
    sm_mhz: float | None = None
    power_w: float | None = None


class UnsupportedCase(Exception):
    """This bench cannot time this case; the reason is the message."""


class UnsupportedFamily(UnsupportedCase):
    """This bench can time no case of this family, for the same reason."""


class Bench(Protocol):
    """What times cases: torch on a GPU, or NumPy on the host."""

    gpu: str
    """Name of the device, as the rows carry it."""

    def time_case(self, case: Case) -> Sample:
        """Time one case's kernels; `UnsupportedCase` where this bench cannot."""
        ...

    def environment(self) -> dict[str, object]:
        """What is to be recorded of the machine."""
        ...


@dataclass(frozen=True)
class WorkloadDims:
    """The few sizes of a bundled workload that decide the shapes of its kernels."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq_len: int
    experts: int = 0
    top_k: int = 0
    expert_hidden: int = 0
    mla: bool = False


MODELS: tuple[WorkloadDims, ...] = (
    WorkloadDims("gpt3-175b", 12288, 49152, 96, 96, 128, 50257, 2048),
    WorkloadDims("llama3-8b", 4096, 14336, 32, 8, 128, 128256, 8192),
    WorkloadDims("llama3-70b", 8192, 28672, 64, 8, 128, 128256, 8192),
    WorkloadDims("llama3-405b", 16384, 53248, 128, 8, 128, 128256, 8192),
    WorkloadDims("mixtral-8x7b", 4096, 14336, 32, 8, 128, 32000, 4096, 8, 2, 14336),
    WorkloadDims("mixtral-8x22b", 6144, 16384, 48, 8, 128, 32768, 4096, 8, 2, 16384),
    WorkloadDims("qwen3-30b-a3b", 2048, 6144, 32, 4, 128, 151936, 4096, 128, 8, 768),
    WorkloadDims("qwen3-235b-a22b", 4096, 12288, 64, 4, 128, 151936, 4096, 128, 8, 1536),
    WorkloadDims("deepseek-v2-lite", 2048, 10944, 16, 16, 192, 102400, 4096, 64, 6, 1408, True),
    WorkloadDims("deepseek-v3", 7168, 18432, 128, 128, 192, 129280, 4096, 256, 8, 2048, True),
    WorkloadDims("kimi-k2", 7168, 18432, 64, 64, 192, 163840, 4096, 384, 8, 2048, True),
    WorkloadDims("gpt-oss-120b", 2880, 2880, 64, 8, 64, 201088, 4096, 128, 4, 2880),
)


Item = tuple[str, str, str, Shape]
"""``(op, variant, dtype, shape)``"""


def grid_and_held_out_cases(
    family: str, grid: Sequence[Item], heldout: Sequence[Item], num: int, fresh: Sequence[Item] = (), num_fresh: int = 0
) -> list[Case]:
    """Cases of a family: the grid, ``num`` held-out shapes that it does not hold, ``num_fresh`` that neither holds.

    The first distinct ones of each count.
    """
    cases = {(c := Case(family, *item[:3], "grid", item[3])).identity: c for item in grid}
    sets: tuple[tuple[Split, Sequence[Item], int], ...] = (("heldout", heldout, num), ("fresh", fresh, num_fresh))
    for split, items, wanted in sets:
        num_kept = 0
        for item in items:
            case = Case(family, *item[:3], split, item[3])
            if num_kept < wanted and case.identity not in cases:
                cases[case.identity] = case
                num_kept += 1
    return list(cases.values())


def log_uniform_multiple(rng: random.Random, low: int, high: int, multiple: int) -> int:
    """A whole multiple, drawn with equal weight per octave."""
    value: float = low * (high / low) ** rng.random()
    return max(multiple, round(value / multiple) * multiple)


def random_expert_loads_text(rng: random.Random, tokens: int, experts: int, skew: float, multiple: int = 16) -> str:
    """Tokens of each expert, as text; ``skew`` is the exponent of a Zipf law, 0 is balanced. Rows come padded."""
    weights = [(i + 1.0) ** -skew for i in range(experts)]
    rng.shuffle(weights)
    total = sum(weights)
    return ",".join(str(max(multiple, round(tokens * w / total / multiple) * multiple)) for w in weights)
