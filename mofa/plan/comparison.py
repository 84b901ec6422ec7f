"""Results beside each other: what of their jobs differs, and where the seconds and bytes do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from mofa.cost.breakdown import MEMORY_COMPONENTS
from mofa.errors import SpecError
from mofa.plan.result import SCHEMA_VERSION as RESULT_VERSION
from mofa.plan.result import Plan, PlanReport
from mofa.plan.step_parts import TIME_COMPONENTS
from mofa.plan.summary import strategy_text
from mofa.specs.base import Spec
from mofa.specs.files import shown_value
from mofa.specs.limited_reads import number_of_json, parse_json, read_bytes
from mofa.specs.strategy import StrategySpec

SCHEMA_VERSION: Final = "1.1"
MOST_RESULTS = 12
"""Results beside each other at most: more are no comparison that people read. [-]"""
UNSAID = ("source", "provenance", "id")
"""Last words of facts that say where numbers come from and change none."""
JOB = ("workload", "cluster", "framework", "job")
"""Fields that say what a result was predicted for."""
MILLION = 1e6
MOST_IN_A_PART = 1e18
"""Seconds or bytes that no part of a result has. [-]"""
MAX_RESULT_BYTES = 2**26
"""Of a file of results: a search with all plans that it may show. [B]"""


class ComparedResult(Spec):
    """One strategy on its cluster."""

    name: str = Field(description="Name in the comparison.")
    mofa_version: str | None = Field(default=None, description="Version of mofa that says it; null before JSON 2.14.")
    num_gpus: int = Field(gt=0, description="GPUs that compute. [-]")
    tokens_per_step: int = Field(gt=0, description="Tokens of the global batch. [tokens]")
    step_s: float = Field(gt=0, description="Time of one step. [s]")
    gpu_s_per_million_tokens: float = Field(gt=0, description="GPUs that compute times seconds for it. [GPU s]")
    mfu: float = Field(ge=0, description="Model FLOP/s over the peak. [-]")
    device_bytes: float = Field(ge=0, description="Memory of the fullest GPU. [B]")
    fits: bool
    days: float | None = Field(default=None, description="Median days of the whole run; null where not known. [d]")
    usd: float | None = Field(default=None, description="Dollars of the whole run; null where not known. [$]")


class ComparedPart(Spec):
    """One part of a step or of a GPU's memory in every result."""

    name: str = Field(description="The component, as time.exposed and memory.by_component name it.")
    by_result: tuple[float, ...] = Field(description="By result. [unit]")

    @property
    def differences(self) -> tuple[float, ...]:
        """What each result has more than the first. [unit]"""
        return tuple(value - self.by_result[0] for value in self.by_result)


class Comparison(Spec):
    """What ``mofa compare --json`` prints.

    Notes
    -----
    ``time`` sums to the step of each result, or to its GPU seconds for a million tokens, as ``time_unit`` says: steps
    of other batches or on other numbers of GPUs say nothing beside each other. ``memory`` sums to ``device_bytes``.
    """

    schema_version: Literal["1.1"] = SCHEMA_VERSION
    results: tuple[ComparedResult, ...] = Field(min_length=2)
    differs: dict[str, tuple[Any, ...]] = Field(
        description="Facts of the jobs, clusters, frameworks and strategies that differ, by dotted name and result."
    )
    time_unit: Literal["s", "GPU s per million tokens"] = Field(description="Of time.")
    time: tuple[ComparedPart, ...] = Field(description="Where the steps go. [time_unit]")
    memory: tuple[ComparedPart, ...] = Field(description="Memory of the fullest GPU. [B]")


def compare(*results: PlanReport | Plan, names: Sequence[str] = ()) -> Comparison:
    """Compare strategies, clusters, workloads or frameworks: where the seconds and bytes differ.

    Parameters
    ----------
    results
        What ``mofa.estimate`` and ``mofa.find_plans(...).report`` returned, two or more; of a search its best plan. The
        others are compared with the first.
    names
        Of the results, in their order; their strategies where absent.

    Returns
    -------
    Comparison
        What of the jobs differs, and every part of the steps [s] and of the fullest GPU's memory [B]. Where batches or
        numbers of GPUs differ, parts are GPU seconds for a million tokens.

    Raises
    ------
    SpecError
        If there are fewer than two results or more than a dozen, a search found nothing, or there are other names than
        results.

    Notes
    -----
    Parts are those that ``time.exposed`` and ``memory.by_component`` of the results name; nothing is predicted anew.
    Source: this comparison is arithmetic on two predictions, whose own sources their notes say.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> two, eight = (mofa.estimate(job, machines, f"tp={tp} sp=true", replay=False) for tp in (2, 8))
    >>> comparison = mofa.compare(two, eight, names=["tp 2", "tp 8"])
    >>> comparison.differs["strategy.tp"]
    (2, 8)
    >>> max(comparison.time, key=lambda part: part.differences[1]).name
    'tp'
    """
    if names and len(names) != len(results):
        raise SpecError(f"names: {len(names)} are not as many as the results ({len(results)}); give one each")
    singles = [single_result(result) for result in results]
    own = [strategy_text(StrategySpec.model_validate(single["strategy"])) for single in singles]
    return compare_results(dict(zip(numbered_duplicate_names(names or own), singles, strict=True)))


def compare_results(results: Mapping[str, Mapping[str, Any]]) -> Comparison:
    """Compare results as their JSON has them, the first with all others.

    Parameters
    ----------
    results
        By name: one strategy each, as :func:`single_result` gives it.

    Returns
    -------
    Comparison
        Totals, seconds and bytes by part of each result, and the facts in which they differ.

    Raises
    ------
    SpecError
        If there are fewer than two or more than a dozen, or one of them lacks what is compared.

    Examples
    --------
    >>> import mofa
    >>> job, machines = mofa.load_workload("llama3-8b"), mofa.load_cluster("h100-hgx", 8)
    >>> plan = mofa.estimate(job, machines, "tp=2 recompute=full", replay=False)
    >>> comparison = compare_results({"a": single_result(plan), "b": single_result(plan)})
    >>> comparison.time_unit, comparison.differs
    ('s', {})
    """
    if not 2 <= len(results) <= MOST_RESULTS:
        raise SpecError(f"results: {len(results)} cannot be compared; give 2 to {MOST_RESULTS}")
    compared, times, memories = [], [], []
    for name, result in results.items():
        refuse_other_json_version(name, result)
        try:
            compared.append(_summary(name, result))
            times.append(_seconds_or_bytes(result["time"]["exposed"]))
            memories.append(_seconds_or_bytes(result["memory"]["by_component"]))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            said = shown_value(f"{type(error).__name__}: {error}".splitlines()[0], 120)
            raise SpecError(f"{name}: is no whole result ({said}); run it again") from None
    same_work = len({(each.num_gpus, each.tokens_per_step) for each in compared}) == 1
    factors = [1.0 if same_work else each.gpu_s_per_million_tokens / each.step_s for each in compared]
    return Comparison(
        results=tuple(compared),
        differs=_differences(list(results.values())),
        time_unit="s" if same_work else "GPU s per million tokens",
        time=_parts(TIME_COMPONENTS, times, factors),
        memory=_parts(MEMORY_COMPONENTS, memories, [1.0] * len(memories)),
    )


def refuse_other_json_version(name: str, result: Mapping[str, Any]) -> None:
    """Refuse a result whose fields may mean something else: of another major version of the JSON.

    Parameters
    ----------
    name
        Of the result, for the error.
    result
        As its JSON has it; one without a version is a plan of this one.

    Raises
    ------
    SpecError
        If its version is of another major one, or is none.

    Examples
    --------
    >>> refuse_other_json_version("old.json", {"schema_version": "2.3"})
    >>> refuse_other_json_version("old.json", {"schema_version": "1.4"})
    Traceback (most recent call last):
    mofa.errors.SpecError: old.json: schema_version ('1.4') is of another major version than 2.15, \
whose fields mean other things; run it again
    """
    said = result.get("schema_version")
    if said is not None and str(said).partition(".")[0] != RESULT_VERSION.partition(".")[0]:
        raise SpecError(
            f"{name}: schema_version ({shown_value(str(said))!r}) is of another major version than {RESULT_VERSION}, "
            "whose fields mean other things; run it again"
        )


def version_text(result: Mapping[str, Any]) -> str:
    """Which version of mofa says a result, in words.

    Parameters
    ----------
    result
        As its JSON has it.

    Returns
    -------
    str
        Its version; that of its JSON where it says no other.

    Examples
    --------
    >>> version_text({"mofa_version": "0.1.0"}), version_text({"schema_version": "2.9"})
    ('mofa 0.1.0', 'JSON 2.9')
    """
    version = result.get("mofa_version")
    return f"mofa {shown_value(str(version))}" if version else f"JSON {shown_value(str(result.get('schema_version')))}"


def _summary(name: str, result: Mapping[str, Any]) -> ComparedResult:
    memory, strategy = result["memory"], result["strategy"]
    for facts, names in ((result, ("step_s", "tokens_per_s_per_gpu", "mfu", "usd")), (memory, ("device_bytes",)),
                         (strategy, ("tp", "cp", "pp", "dp"))):  # fmt: skip
        if wrong := next((each for each in names if isinstance(facts.get(each), bool)), None):
            raise ValueError(f"{wrong} ({facts[wrong]}) is no number")
    num_gpus = strategy["tp"] * strategy["cp"] * strategy["pp"] * strategy["dp"]
    tokens = round(result["tokens_per_s_per_gpu"] * result["step_s"] * num_gpus)
    days = result.get("days")
    return ComparedResult(
        name=name, mofa_version=result.get("mofa_version"), num_gpus=num_gpus, tokens_per_step=tokens,
        step_s=result["step_s"],
        gpu_s_per_million_tokens=result["step_s"] * num_gpus / tokens * MILLION, mfu=result["mfu"],
        device_bytes=memory["device_bytes"], fits=memory["fits"],
        days=None if days is None else days["p50"], usd=result.get("usd"),
    )  # fmt: skip


def _seconds_or_bytes(parts: Mapping[str, Any]) -> dict[str, float]:
    """Parts as numbers, all of them finite."""
    numbers = {str(name): number_of_json(value) for name, value in parts.items()}
    if odd := [name for name, value in numbers.items() if not -MOST_IN_A_PART < value < MOST_IN_A_PART]:
        raise ValueError(f"{odd[0]} is {numbers[odd[0]]:g}")
    return numbers


def _parts(
    order: Sequence[str], named: Sequence[Mapping[str, float]], factors: Sequence[float]
) -> tuple[ComparedPart, ...]:
    """Parts that any result has, in their usual order."""
    names = [*order, *sorted({name for parts in named for name in parts} - set(order))]
    pairs = list(zip(named, factors, strict=True))
    return tuple(
        ComparedPart(name=name, by_result=tuple(parts.get(name, 0.0) * factor for parts, factor in pairs))
        for name in names
        if any(parts.get(name) for parts in named)
    )


def _differences(results: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Facts that are not the same in all results, by dotted name; a fact that one lacks is None there."""
    facts = [dict(_facts(result)) for result in results]
    names = dict.fromkeys(name for each in facts for name in each)
    values = {name: tuple(each.get(name) for each in facts) for name in names}
    return {name: value for name, value in values.items() if any(other != value[0] for other in value)}


def _facts(result: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a result was asked for: every number and word of its job, cluster, framework and strategy."""
    yield "mofa_version", result.get("mofa_version")
    yield "schema_version", result.get("schema_version")
    for section in (*JOB, "strategy", "layout", "costed_by"):
        yield from _leaves(section, result.get(section))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in UNSAID:
                yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value))
    else:
        yield name, value


def single_result(result: PlanReport | Plan | Mapping[str, Any], number: int = 1) -> dict[str, Any]:
    """One strategy of a result with its job, as JSON has it: an estimate, or one of a search's plans.

    Parameters
    ----------
    result
        Of a search or an estimate, or its JSON.
    number
        Which of the plans, 1 the best. [-]

    Returns
    -------
    dict of str to object
        The strategy's fields, and the search's workload, cluster, framework and job.

    Raises
    ------
    SpecError
        If there are not as many plans.

    Examples
    --------
    >>> single_result({"schema_version": "2.0", "step_s": 1.5})["step_s"]
    1.5
    >>> single_result({"schema_version": "2.0", "plans": []}, 2)
    Traceback (most recent call last):
    mofa.errors.SpecError: plan 2: is not there, the search has 0; name one of them
    """
    raw = result if isinstance(result, Mapping) else result.model_dump(mode="json")
    if "plans" not in raw:
        if number != 1:
            raise SpecError(f"plan {number}: is not there, the result is of one strategy; leave the number out")
        return dict(raw)
    plans = raw["plans"]
    if not isinstance(plans, list) or not 1 <= number <= len(plans):
        raise SpecError(f"plan {number}: is not there, the search has {len(plans)}; name one of them")
    shared = {key: raw.get(key) for key in ("schema_version", "mofa_version", *JOB)}
    plan = plans[number - 1]
    if not isinstance(plan, Mapping):
        raise SpecError(f"plan {number}: is no plan; run the search again")
    return {**shared, **plan}


def numbered_duplicate_names(names: Iterable[str]) -> list[str]:
    """Names with a number behind those that come again.

    Parameters
    ----------
    names
        Of results, in order.

    Returns
    -------
    list of str
        As many, no two alike.

    Examples
    --------
    >>> numbered_duplicate_names(["plan", "plan", "other"])
    ['plan', 'plan (2)', 'other']
    """
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return out


def read_results(file: Path, number: int = 1) -> list[dict[str, Any]]:
    """The results of a file that ``--json`` or ``--json-file`` wrote: one strategy, or every estimate of a list.

    Parameters
    ----------
    file
        What ``--json`` printed, or ``--json-file`` wrote.
    number
        Which of a search's plans, 1 the best. [-]

    Returns
    -------
    list of dict
        Each as :func:`single_result` gives it.

    Raises
    ------
    SpecError
        If it is no such file, or has no plan of that number.

    Examples
    --------
    >>> read_results(Path("no such file"))
    Traceback (most recent call last):
    mofa.errors.SpecError: no such file: no such file; check the path
    """
    where = shown_value(str(file), 200)
    data = read_bytes(file, where, MAX_RESULT_BYTES, "give the JSON of one search")
    raw = parse_json(data, where, "name what mofa plan --json or estimate --json wrote")
    listed = raw if isinstance(raw, list) else [raw]
    if not listed or not all(isinstance(each, dict) and "schema_version" in each for each in listed):
        raise SpecError(f"{where}: is no result of mofa; name what mofa plan --json or estimate --json wrote")
    try:
        return [single_result(each, number) for each in listed]
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
