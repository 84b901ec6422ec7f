"""How far measured runs lay from their predictions: what the memory margin and the band of a step rest on."""

from __future__ import annotations

from functools import lru_cache

from pydantic import Field

from mofa.specs.base import Fact, Spec
from mofa.specs.build import build
from mofa.specs.files import data_dir, load_yaml
from mofa.specs.framework import PYTORCH_MODULES

FILE = "residuals.yaml"


class StepBand(Spec):
    """10 % and 90 % quantiles of measured over predicted step time - 1. [-]"""

    low: Fact
    high: Fact


class Residuals(Spec):
    """``device_memory`` is the 99 % quantile of measured over predicted device memory - 1; ``step`` by framework."""

    device_memory: Fact
    step: dict[str, StepBand] = Field(description="megatron: all of its layer specs; torchtitan: PyTorch modules.")

    def step_band(self, framework: str) -> StepBand:
        """The band of a framework's kind."""
        return self.step["torchtitan" if framework in PYTORCH_MODULES else "megatron"]


@lru_cache(maxsize=1)
def load_residuals() -> Residuals:
    """The bundled residuals; ``python scripts/residuals.py`` makes the file anew.

    Examples
    --------
    >>> 0.0 < load_residuals().device_memory.value < 0.1
    True
    """
    path = data_dir("hardware_profiles") / FILE
    return build(Residuals, load_yaml(path, FILE), FILE)
