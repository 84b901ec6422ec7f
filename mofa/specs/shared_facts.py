"""What was learned on machines or runs and serves all of them: no GPU, node, host or framework has it of its own."""

from __future__ import annotations

from functools import lru_cache

from mofa.specs.base import BytesFact, PositiveFact, SecondsFact, ShareFact, Spec
from mofa.specs.files import data_dir, load_yaml
from mofa.specs.from_mapping import spec_from_mapping

FILE = "shared.yaml"


class LibraryFacts(Spec):
    """Facts of libraries of kernels (cuBLAS, DeepEP, PyTorch) that hold on any GPU."""

    product_outputs_without_counter: PositiveFact
    """Elements of a bf16 product's result beyond which a memset precedes its kernel: its tiles are then handed out
    from a counter. [elements]"""
    equal_tile_time_ratio: PositiveFact
    """Time over the fastest tile's up to which a tile counts as good as it: among them cuBLAS takes large ones. [-]"""
    deepep_buffer: BytesFact
    """What a rank holds for DeepEP beside NCCL's communicators. [B]"""
    products_share_between: ShareFact
    """Share of the time that products took where they were timed between memory-bound kernels. [-]"""


class RoutingFacts(Spec):
    """How experts' popularity moves, and what scheduling tokens over replicas takes."""

    popularity_spread: ShareFact
    """Standard deviation, over steps, of the popularity of an expert whose router learns, over its mean: beside tokens
    that choose one by one. [-]"""
    solve: SecondsFact
    """A warm solve of one layer's schedule, whatever its size. [s]"""
    solve_per_replica: SecondsFact
    """What each replica of an expert adds to it. [s]"""
    scheduled_dispatch: SecondsFact
    """What a dispatch to replicas takes beyond one to experts, without solving. [s]"""


class LayerSplitWeights(Spec):
    """How layers are weighed where a framework leaves the split to its user."""

    embedding_param_cost: PositiveFact
    """Cost of an embedding parameter over that of a matrix parameter. [-]"""


class ClosedFormTolerances(Spec):
    """By how much closed forms and the search's shortcuts were seen to be off: within it, what they say is played.

    All are shares. [-]
    """

    shard_ends: ShareFact
    """By how much the first and the last shard of a stage differ at most, as a share of the GPU's capacity. [-]"""
    stage: ShareFact
    """How far a stage's closed form may be below the fullest rank played for it to be the fullest. [-]"""
    stage_with_whole_expert_gradients: ShareFact
    """The same of stages with the embedding or the head where FSDP's pipelines make experts' gradients whole. [-]"""
    allocated: ShareFact
    """How far allocated memory may be from what is played. [-]"""
    recomputing_shortens: ShareFact
    """By how much of it a step may be shorter at most for recomputing something. [-]"""
    recomputing_shortens_pairs: ShareFact
    """The same of forwards beside backwards. [-]"""
    unrecomputed_layer: ShareFact
    """By how much a layer that is no longer recomputed may take less memory than in closed form. [-]"""
    linear_memory: ShareFact
    """By how much memory that is taken as linear in layers may be too high. [-]"""


class SharedFacts(Spec):
    """All facts of no one machine, as hardware_profiles/shared.yaml has them with provenance and source."""

    libraries: LibraryFacts
    routing: RoutingFacts
    layers: LayerSplitWeights
    tolerances: ClosedFormTolerances


@lru_cache(maxsize=1)
def load_shared_facts() -> SharedFacts:
    """The bundled facts of no one machine: libraries, routing, weights of layers, tolerances.

    Examples
    --------
    >>> load_shared_facts().routing.popularity_spread.value
    0.18
    """
    return spec_from_mapping(SharedFacts, load_yaml(data_dir("hardware_profiles") / FILE, FILE), FILE)
