"""A group of GPUs whose tokens are scheduled over replicas, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mofa.errors import SpecError
from mofa.routing.balance.communication_lp import TransferCosts
from mofa.routing.balance.place import PlacementAdaptationRule
from mofa.routing.placement import Placement, slots_per_gpu, symmetric_placement
from mofa.specs.ranges import MOST_LOAD_FACTOR

Solver = Literal["auto", "lp", "flow", "communication"]
MAX_EXPERTS = 8192
LP_GPUS = 64


@dataclass(frozen=True)
class BalanceSetup:
    """A group of GPUs that merges whole expert-parallel groups, and how its tokens are scheduled.

    ``solver`` ``auto`` is the linear program on up to 64 GPUs, where it goes on from the micro-batch before within a
    millisecond (benchmarks/balance_speed.py), and flows beyond; both have the same optimum.
    ``communication`` is the program that weighs what is sent. ``capacity_factor`` is that of the baseline that drops.
    ``placement`` is one of one's own, the symmetric one where absent.
    """

    num_experts: int
    num_gpus: int
    ep: int
    gpus_per_node: int = 8
    solver: Solver = "auto"
    weights: TransferCosts = field(default_factory=TransferCosts)
    adaptation: PlacementAdaptationRule = field(default_factory=PlacementAdaptationRule)
    capacity_factor: float = 1.0
    seed: int = 0
    placement: Placement | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.num_experts > MAX_EXPERTS:
            raise SpecError(f"experts ({self.num_experts}): more than {MAX_EXPERTS} are not scheduled; give fewer")
        slots_per_gpu(self.num_experts, self.num_gpus, self.ep)
        if self.num_gpus == self.ep:
            raise SpecError(
                f"gpus ({self.num_gpus}) must be above ep ({self.ep}): replicas need two EP groups to merge"
            )
        if self.experts_per_gpu < 2:
            raise SpecError(f"ep ({self.ep}): a GPU holds one of {self.num_experts} experts, and needs two; lower ep")
        if not 0 < self.capacity_factor <= MOST_LOAD_FACTOR:
            raise SpecError(
                f"capacity factor ({self.capacity_factor:g}) must be above 0 and at most {MOST_LOAD_FACTOR:g}"
            )
        if self.placement is not None:
            self._check_placement(self.placement)

    def _check_placement(self, placement: Placement) -> None:
        shape = placement.num_experts, placement.num_gpus
        if shape != (self.num_experts, self.num_gpus):
            raise SpecError(
                f"placement: is of {shape[0]} experts on {shape[1]} GPUs, the group has {self.num_experts} on "
                f"{self.num_gpus}; pass one of the same group"
            )
        has = placement.copies.sum(axis=0)
        if has.max() > self.experts_per_gpu:
            gpu = int(has.argmax())
            raise SpecError(
                f"placement: GPU {gpu} has {has[gpu]} replicas, "
                f"and a GPU holds {self.experts_per_gpu}; put some on another GPU"
            )

    @property
    def num_merged_ep_groups(self) -> int:
        """Expert-parallel groups in the group. [-]"""
        return self.num_gpus // self.ep

    @property
    def experts_per_gpu(self) -> int:
        """Experts that a GPU holds. [-]"""
        return self.num_experts // self.ep

    @property
    def placement_of_replicas(self) -> Placement:
        """Where replicas are scheduled."""
        if self.placement is not None:
            return self.placement
        return symmetric_placement(self.num_experts, self.num_gpus, self.ep, self.seed)

    @property
    def resolved_solver(self) -> str:
        """What ``auto`` stands for."""
        if self.solver != "auto":
            return self.solver
        return "lp" if self.num_gpus <= LP_GPUS else "flow"
