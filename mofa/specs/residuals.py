"""How far measured runs lay from their predictions, and closed forms from the replay: what the memory margin and the
band of a step rest on."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Literal, Self

from pydantic import Field, model_validator

from mofa.specs.base import CountFact, Fact, Positive, Spec
from mofa.specs.cuda_graphs import CudaGraphs, Implementation
from mofa.specs.files import data_dir, load_yaml
from mofa.specs.framework_traits import Layers
from mofa.specs.from_mapping import spec_from_mapping

FILE = "residuals.yaml"
STEPS_FILE = "step_residuals.csv"
"""Every residual behind the groups, one row a configuration."""
CLOSED_FORM_FILE = "closed_form_residuals.yaml"

Nodes = Literal["one node", "several nodes"]
Products = Literal["bf16", "fp8"]
Experts = Literal["dense", "experts below half", "experts half or more"]
Pace = Literal["device-bound", "host-bound"]


class Circumstances(Spec):
    """What a step's residual goes by, from what divides runs first to what divides them last."""

    nodes: Nodes
    layers: Layers
    experts: Experts = Field(description="Share of the model's FLOPs in routed experts.")
    pace: Pace = Field(description="Whether the device waits for its host, on the host it is predicted on.")
    products: Products = Field(description="Number format of the layers' matrix products.")

    @property
    def levels_in_order(self) -> tuple[str, ...]:
        """Its levels in order: groups are prefixes of it."""
        return self.nodes, self.layers, self.experts, self.pace, self.products


LEVELS = tuple(Circumstances.model_fields)
ALL: tuple[str, ...] = ()
"""The group of all runs."""


def residual_group_text(path: tuple[str, ...]) -> str:
    """A group in words.

    Examples
    --------
    >>> residual_group_text(("one node", "pytorch")), residual_group_text(())
    ('one node, pytorch', 'all runs')
    """
    return ", ".join(path) if path else "all runs"


class StepResidualGroup(Spec):
    """Runs alike in their first circumstances, and between which logarithms of measured over predicted 8 in 10 lie.

    A group borrows from the next wider one; the fewer its runs, the more.

    ``low`` is relative to the step on the fastest host that is plausible, ``high`` to that on the slowest; where the
    host is known both are the predicted step. [-]
    """

    path: tuple[str, ...]
    runs: Positive
    families: Positive
    """Sources and models whose runs hang together; those of ours by model. [-]"""
    sources: tuple[str, ...]
    """Where they are from: ``measured`` are ours."""
    few: bool = False
    """Whether its own runs, those of a family counted less, are too few for tenths: fewer than nine."""
    low: Fact
    high: Fact

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.path) > len(LEVELS) or not len(self.sources) <= self.families <= self.runs:
            raise ValueError(
                f"group {residual_group_text(self.path)}: runs, families, sources and path do not go together"
            )
        if self.low.value > self.high.value:
            raise ValueError(f"group {residual_group_text(self.path)}: low ({self.low.value:g}) is above high")
        return self


class MeasuredCoverage(Spec):
    """Frameworks, nodes, products and experts that measured runs with one kind of layers covered; no others were."""

    frameworks: tuple[str, ...]
    most_nodes: CountFact
    products: tuple[Products, ...]
    experts: tuple[Experts, ...]


class RowsWithoutRecomputation(Spec):
    """Rows that leave recomputation blank, of nodes and layers of which others are few, and those others; elsewhere
    rows with a blank say nothing."""

    path: tuple[str, ...]
    """Their nodes and layers."""
    gpus: tuple[str, ...]
    seen: MeasuredCoverage


class StepResiduals(Spec):
    """Groups of residuals from all runs down to those alike in everything, and what they were measured on."""

    groups: tuple[StepResidualGroup, ...]
    family_correlation: Fact
    """How alike runs of a family are: their intraclass correlation. [-]"""
    pair_difference: dict[Pace, Fact]
    """How far apart the residuals of two runs are that one family has and that are alike in everything, by pace: the
    median of the families' medians. Absent where no family has two. [-]"""
    unmeasured_low: Fact
    """The smallest of all: where nothing was measured. [-]"""
    unmeasured_high: Fact
    """The largest. [-]"""
    gpus: tuple[str, ...]
    stand_ins: tuple[RowsWithoutRecomputation, ...] = ()
    seen: dict[Layers, MeasuredCoverage]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if ALL not in self._by_path:
            raise ValueError("step.groups lacks the group of all runs, whose path is empty")
        if len(self._by_path) != len(self.groups):
            raise ValueError("step.groups has two groups of one path")
        return self

    @cached_property
    def _by_path(self) -> dict[tuple[str, ...], StepResidualGroup]:
        return {group.path: group for group in self.groups}

    def narrowest_group_of_circumstances(self, circumstances: Circumstances) -> StepResidualGroup:
        """The narrowest group that a step belongs to."""
        return self.narrowest_group_of_path(circumstances.levels_in_order)

    def narrowest_group_of_path(self, path: tuple[str, ...]) -> StepResidualGroup:
        """The narrowest group that all runs of a path belong to."""
        return next(self._by_path[path[:depth]] for depth in range(len(path), -1, -1) if path[:depth] in self._by_path)

    def stand_in_rows(self, path: tuple[str, ...]) -> RowsWithoutRecomputation | None:
        """The rows with a blank that stand in for steps of a path; None where better ones were measured."""
        return next((item for item in self.stand_ins if item.path == path[: len(item.path)]), None)

    def unmeasured_text(self, circumstances: Circumstances, *, gpu: str, framework: str, nodes: int) -> tuple[str, ...]:
        """What of a step no fitted run had, in words; nothing where all of it was measured."""
        stand_in = self.stand_in_rows(circumstances.levels_in_order)
        seen = self.seen.get(circumstances.layers) if stand_in is None else stand_in.seen
        gpus = self.gpus if stand_in is None else (*self.gpus, *stand_in.gpus)
        if seen is None:
            return (f"{circumstances.layers} layers",)
        with_them = f"with {circumstances.layers} layers"
        most = int(seen.most_nodes.value)
        checks = (
            (framework in seen.frameworks, framework),
            (gpu in gpus, f"GPU {gpu}"),
            (nodes <= most, f"{nodes} nodes {with_them}, where {most} are the most"),
            (circumstances.products in seen.products, f"{circumstances.products} {with_them}"),
            (circumstances.experts in seen.experts, f"{circumstances.experts} {with_them}"),
        )
        return tuple(words for known, words in checks if not known)


class MemoryAndStepResiduals(Spec):
    """``device_memory`` is the 99 % quantile of measured over predicted device memory - 1, ``graphs_memory`` the most
    of few runs with CUDA graphs, by their implementation; ``step`` the step's."""

    device_memory: Fact
    graphs_memory: dict[Implementation, Fact]
    step: StepResiduals

    def memory_margin(self, graphs: CudaGraphs) -> Fact:
        """Share of a GPU's capacity that a plan with these graphs leaves free. [-]

        Examples
        --------
        >>> shares = [load_residuals().memory_margin(CudaGraphs.parse(text)).value for text in ("none", "local")]
        >>> shares[0] < shares[1]
        True
        """
        of_graphs = self.graphs_memory.get(graphs.implementation) if graphs.captures_any else None
        if of_graphs is None:
            return self.device_memory
        share = of_graphs.value / (1.0 + of_graphs.value)
        return (
            self.device_memory if share <= self.device_memory.value else of_graphs.model_copy(update={"value": share})
        )


@lru_cache(maxsize=1)
def load_residuals() -> MemoryAndStepResiduals:
    """The bundled residuals; ``python scripts/residuals.py`` makes the file anew.

    Examples
    --------
    >>> 0.0 < load_residuals().device_memory.value < 0.1
    True
    """
    path = data_dir("hardware_profiles") / FILE
    return spec_from_mapping(MemoryAndStepResiduals, load_yaml(path, FILE), FILE)


class ClosedFormResiduals(Spec):
    """The most of replayed over reserved memory in closed form - 1, by framework, on one stage and in pipelines. [-]"""

    single_stage: dict[str, Fact]
    pipelines: dict[str, Fact]

    def reserved_memory_residual(self, framework: str, pp: int) -> Fact:
        """That of a framework's strategies of so many stages."""
        return (self.pipelines if pp > 1 else self.single_stage)[framework]


@lru_cache(maxsize=1)
def load_closed_form_residuals() -> ClosedFormResiduals:
    """The bundled residuals of closed forms; ``python scripts/closed_form_residuals.py`` makes the file anew.

    Examples
    --------
    >>> sorted(load_closed_form_residuals().pipelines)
    ['megatron', 'megatron-2022', 'megatron-local', 'torchtitan']
    """
    path = data_dir("hardware_profiles") / CLOSED_FORM_FILE
    return spec_from_mapping(ClosedFormResiduals, load_yaml(path, CLOSED_FORM_FILE), CLOSED_FORM_FILE)
