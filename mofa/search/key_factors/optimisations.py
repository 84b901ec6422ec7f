"""The optimisations that an ablation takes out and adds up, each by the search's own switches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from mofa.errors import SpecError
from mofa.schedules import SCHEDULES
from mofa.search.job_setup import with_numerics
from mofa.search.key_factors.factor_search import FactorSearch
from mofa.search.offers import numerics_offers
from mofa.search.space import RECOMPUTE_KINDS_BY_WORD, searched_recompute_modes, values_of_fixed_field
from mofa.specs.framework import FrameworkSpec
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import FP8_RECIPES

FP8 = "fp8 products"
GRID = ("tp", "cp", "pp", "dp")
"""Degrees whose product is the number of GPUs."""
DEGREES = {*GRID, "vpp", "ep"}


@dataclass(frozen=True)
class Optimisation:
    """One optimisation, and what takes it out of a search or brings it in."""

    name: str
    without: tuple[str, ...] = ()
    """Words of ``--without`` that take it out."""
    framework_off: Mapping[str, bool] = field(default_factory=dict)
    """Options of the framework that take it out."""
    with_: tuple[str, ...] = ()
    """Words of ``--with`` that bring it in."""
    replaces_plans: bool = False
    """Whether it changes plans of a search, instead of adding some: then those without it are searched for as well."""
    changes_numerics: bool = False
    needs_experts: bool = False
    needs_above_1: tuple[str, ...] = ()
    """Degrees without which no plan has it."""

    @property
    def strategy_fields(self) -> frozenset[str]:
        """Fields of a strategy that the optimisation may set, by the names of ``--fix``."""
        words = (*self.without, *self.with_, *self.framework_off)
        return frozenset("balancing" if word == "micro_moe" else word for word in words)


OPTIMISATIONS = (
    Optimisation("sequence parallelism", without=("sp",), needs_above_1=("tp",)),
    Optimisation("interleaving", without=("vpp",), needs_above_1=("pp", "vpp")),
    Optimisation("recomputation", without=("recompute",)),
    Optimisation(
        "overlap of communication",
        without=("tp_overlap",),
        framework_off={"overlap_grad_reduce": False, "overlap_param_gather": False},
    ),
    Optimisation(FP8, with_=FP8_RECIPES, replaces_plans=True, changes_numerics=True),
    Optimisation(
        "expert overlap", with_=("expert_overlap",), replaces_plans=True, needs_experts=True, needs_above_1=("ep",)
    ),
    Optimisation("token chunks", with_=("token_chunks",), needs_experts=True),
    Optimisation("MicroMoE", with_=("micro_moe",), needs_experts=True, needs_above_1=("ep",)),
)
"""In the order in which they are added up: what a framework does without being asked, then what ``--with`` asks for."""


def framework_without_overlap(framework: FrameworkSpec, options: Mapping[str, bool]) -> FrameworkSpec | None:
    """A framework with some options off; None where it cannot do without them.

    Parameters
    ----------
    framework
        As the job has it.
    options
        Of :attr:`Optimisation.framework_off`.

    Returns
    -------
    FrameworkSpec or None
        torchtitan always overlaps, so that it has none.

    Examples
    --------
    >>> import mofa
    >>> off = {"overlap_grad_reduce": False}
    >>> framework_without_overlap(mofa.load_framework("megatron"), off).overlap_grad_reduce
    False
    >>> framework_without_overlap(mofa.load_framework("torchtitan"), off) is None
    True
    """
    try:
        return FrameworkSpec.model_validate({**framework.model_dump(), **options})
    except ValidationError:
        return None


def why_optimisation_unavailable(optimisation: Optimisation, search: FactorSearch) -> str:
    """Why an optimisation cannot be taken out of a job or brought into it; empty where it can.

    Parameters
    ----------
    optimisation
        Which.
    search
        The job with all that the user asked for.

    Returns
    -------
    str
        In words.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> search = FactorSearch(job, machines, mofa.load_framework("megatron"), fix={"vpp": 2})
    >>> asked = [item for item in OPTIMISATIONS if item.name in ("interleaving", "token chunks")]
    >>> [why_optimisation_unavailable(item, search) for item in asked]
    ['as --fix vpp has it', 'needs experts']
    """
    if optimisation.needs_experts and search.workload.model.moe is None:
        return "needs experts"
    if fixed := sorted(optimisation.strategy_fields & set(search.fix)):
        return f"as --fix {fixed[0]} has it"
    if given := sorted({*optimisation.with_} & {*search.with_}):
        return f"--with {given[0]} is in every plan"
    if left_out := sorted({*optimisation.without} & {*search.without}):
        return f"--without {left_out[0]} takes it out"
    if "recompute" in optimisation.without and (words := _words_that_leave_no_recomputation(search)):
        return f"{' '.join(f'--without {word}' for word in words)} {'take' if words[1:] else 'takes'} it out"
    for degree in optimisation.needs_above_1:
        if options := _options_that_set_to_1(degree, search):
            return f"needs {degree} above 1: {options}"
    if optimisation.name == FP8 and search.workload.precision.fp8_recipe:
        return f"products are {search.workload.precision.gemm} in every plan"
    if "micro_moe" in optimisation.with_ and search.workload.routing.kind == "balanced":
        return "routing is balanced: there is nothing to balance"
    if optimisation.framework_off and framework_without_overlap(search.framework, optimisation.framework_off) is None:
        return f"{search.framework.name} always overlaps"
    return ""


def _words_that_leave_no_recomputation(search: FactorSearch) -> list[str]:
    """Words of ``--without`` that take out every mode of recomputation that the framework has; none where one is left.

    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> search = FactorSearch(job, machines, mofa.load_framework("megatron"), without=("selective", "cp", "full"))
    >>> _words_that_leave_no_recomputation(search)
    ['selective', 'full']
    """
    words = [word for word in search.without if word in RECOMPUTE_KINDS_BY_WORD]
    left_out = {kind for word in words for kind in RECOMPUTE_KINDS_BY_WORD[word]}
    kinds = {spec.kind for spec, _ in searched_recompute_modes(search.workload, search.framework)}
    return words if words and kinds - left_out <= {"none"} else []


def _options_that_set_to_1(degree: str, search: FactorSearch) -> str:
    """Which options leave a degree no other value than 1, by itself or by what is left of the GPUs; empty where none.

    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 16)
    >>> search = FactorSearch(job, machines, mofa.load_framework("megatron"), fix={"tp": 8, "dp": (2, 4)})
    >>> _options_that_set_to_1("pp", search), _options_that_set_to_1("tp", search)
    ('--fix tp=8 --fix dp=2,4 on 16 GPUs', '')
    """
    fixed = {
        name: [int(str(value)) for value in values_of_fixed_field(search.fix[name])]
        for name in DEGREES & set(search.fix)
    }
    if degree in search.without:
        return f"--without {degree}"
    if fixed.get(degree) == [1]:
        return f"--fix {degree}=1"
    if search.maximum.get(degree) == 1:
        return f"--max {degree}=1"
    schedules = values_of_fixed_field(search.fix.get("schedule", ()))
    if degree == "vpp" and schedules and not any(SCHEDULES[str(name)].has_several_chunks for name in schedules):
        return f"--fix schedule={','.join(map(str, schedules))}"
    others = {name: fixed[name] for name in GRID if name in fixed and name != degree}
    num_gpus = search.cluster.num_gpus
    if degree not in GRID or 2 * math.prod(min(values) for values in others.values()) <= num_gpus:
        return ""
    words = [f"--fix {name}={','.join(map(str, values))}" for name, values in others.items() if values != [1]]
    return " ".join([*words, f"on {num_gpus:,} {'GPU' if num_gpus == 1 else 'GPUs'}"])


def fastest_fp8_recipe(search: FactorSearch, strategy: StrategySpec) -> str:
    """The recipe of fp8 products with which a strategy's step is shortest, in closed form.

    Parameters
    ----------
    search
        The job.
    strategy
        Its best plan's; if its sizes go with none, the first recipe that the GPU and the framework have is taken.

    Returns
    -------
    str
        A word of ``--with``.

    Raises
    ------
    SpecError
        If the GPU or the framework has no fp8 products.
    """
    offers = numerics_offers(search.workload, search.cluster, search.framework, strategy)
    recipes = {offer.word: offer.step_change for offer in offers if offer.word in FP8_RECIPES}
    if recipes:
        return min(recipes, key=lambda word: recipes[word])
    refusals = []
    for word in FP8_RECIPES:
        try:
            with_numerics(search.workload, search.cluster, search.framework, (*search.with_, word))
        except SpecError as error:
            refusals.append(error)
            continue
        return word
    raise refusals[0]
