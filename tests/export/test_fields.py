"""Every field of a job is said to every framework, refused, or has a reason for no argument."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

import mofa
from mofa.errors import SpecError
from mofa.export import bridge, chakra, megatron, torchtitan
from mofa.export.all_tables import TABLES
from mofa.export.arguments import ArgumentTable
from mofa.export.entry import job_file_makers
from mofa.export.fields import job_field_paths
from mofa.search.one_plan import plan_in_closed_form
from mofa.specs.framework import FrameworkSpec
from mofa.specs.framework_traits import TRAITS
from mofa.specs.strategy import StrategySpec
from mofa.specs.workload import WorkloadSpec
from scripts.framework_wheels import WHEELS
from tests.export.jobs import job_of
from tests.export.random_plans import Drawn

JOBS = {
    "megatron": ["qwen3-30b-a3b", "deepseek-v2-lite", "gpt3-175b"],
    "torchtitan": ["qwen3-30b-a3b", "deepseek-v2-lite", "llama3-8b"],
}
"""Workloads that between them have all parts of a model that a framework runs."""


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_field_is_said_refused_or_has_a_reason(table: ArgumentTable) -> None:
    places = [set(table.represented_fields), set(table.fixed), set(table.facts), set(table.free)]
    assert sorted(set(job_field_paths()) - set().union(*places)) == []
    assert sorted(set().union(*places) - set(job_field_paths())) == []
    twice = [
        name for i, place in enumerate(places) for name in place if any(name in other for other in places[i + 1 :])
    ]
    assert twice == []
    reasons = [*table.free.values(), *table.facts.values(), *(fixed.why for fixed in table.fixed.values())]
    assert all(len(reason.split()) >= 2 for reason in reasons)


OTHER_THAN_NOW: dict[str, list[Any]] = {
    "strategy.recompute": ["none", "full", "selective:mlp"], "strategy.layout": ["Et*5|t*43L", "Et*20|t*28L"],
    "strategy.micro_batch": [1, 2], "framework.python_functions": [], "framework.name": [],
    "framework.compile": [False, True], "model.multipliers": [["logits"]],
}  # fmt: skip
"""Values to try where a field's type says too little."""


def _annotation(path: str) -> Any:
    first, _, rest = path.partition(".")
    spec: Any = {"strategy": StrategySpec, "framework": FrameworkSpec}.get(first, WorkloadSpec)
    names = (rest if spec is not WorkloadSpec else path).split(".")
    for name in names[:-1]:
        spec = next(
            part for part in _records(spec.model_fields[name].annotation) if _has(part, names[names.index(name) + 1 :])
        )
    return spec.model_fields[names[-1]].annotation


def _has(spec: type[BaseModel], names: list[str]) -> bool:
    if names[0] not in spec.model_fields:
        return False
    return len(names) == 1 or any(_has(part, names[1:]) for part in _records(spec.model_fields[names[0]].annotation))


def _records(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) is Annotated:
        return _records(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [spec for option in get_args(annotation) for spec in _records(option)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _others(path: str, value: Any) -> list[Any]:
    """Other values of a field."""
    if path in OTHER_THAN_NOW:
        return [other for other in OTHER_THAN_NOW[path] if other != value]
    options: list[Any] = []
    pending = [_annotation(path)]
    while pending:
        annotation = pending.pop()
        if get_origin(annotation) in (Union, UnionType):
            pending += get_args(annotation)
        elif get_origin(annotation) is Annotated:
            pending.append(get_args(annotation)[0])
        elif get_origin(annotation) is Literal:
            options += get_args(annotation)
        elif annotation is bool:
            options += [True, False]
        elif annotation is int:
            options += [1, 2, 16] if value is None else [value * 2, value + 1, 2]
        elif annotation is float:
            options += [0.25, 1.25, 2.0, 6.0]
        elif annotation is str:
            options.append("2.9")
    return [option for option in options if option != value]


def _changed(drawn: Drawn, path: str, value: Any) -> Drawn | None:
    """The job with one field changed, whether it could run so or not; None where it cannot be said."""
    first, _, rest = path.partition(".")
    try:
        if first == "strategy":
            strategy = drawn.plan.strategy.model_copy(update={rest: value})
            return drawn._replace(plan=drawn.plan.model_copy(update={"strategy": strategy}))
        if first == "framework" and rest:
            facts = FrameworkSpec.model_validate(drawn.framework.model_dump() | {rest: value})
            return drawn._replace(framework=facts)
        raw = drawn.workload.model_dump(exclude_none=True)
        place = raw
        *parents, last = path.split(".")
        for name in parents:
            place = place[name]
        place[last] = value
        return drawn._replace(workload=WorkloadSpec.model_validate(raw))
    except (ValidationError, KeyError, TypeError):
        return None


def _files(drawn: Drawn, to: str) -> str:
    try:
        files = job_file_makers()[to](job_of(drawn, to))
    except SpecError as error:
        return f"refused: {error}"
    texts = ["\n".join(line for line in text.splitlines() if not line.startswith("#")) for text in files.values()]
    return "\n".join(texts)  # without heads, which say everything


@pytest.mark.parametrize("to", list(TABLES))
def test_no_choice_is_lost(to: str) -> None:
    """A field with another value makes other files, or is refused: what an export does not say cannot differ."""
    framework = "torchtitan" if to.startswith("torchtitan") else "megatron"
    cluster = mofa.load_cluster("h100-hgx", 8)
    table = TABLES[to]
    jobs = []
    for name in JOBS[framework]:
        seq_len = 2048 if name == "gpt3-175b" else 4096  # the positions that it learns
        workload, facts = mofa.load_workload(name, seq_len=seq_len, global_batch=64), mofa.load_framework(framework)
        if framework == "torchtitan":
            workload = mofa.load_workload(name, seq_len=4096, global_batch=64, overrides={"model.num_mtp_layers": 0})
        experts = "ep=2" if workload.model.moe is not None else ""
        strategy = f"tp=2 sp=true cp=2 micro_batch=1 recompute=full {experts}"
        jobs.append(Drawn(workload, cluster, facts, plan_in_closed_form(workload, cluster, strategy, facts)))
        if to == "torchtitan" and name.startswith("qwen3"):
            continue  # it has no pipelines of it
        strategy = f"pp=2 micro_batch=1 recompute=none {experts}"
        jobs.append(Drawn(workload, cluster, facts, plan_in_closed_form(workload, cluster, strategy, facts)))
    for name, overrides in MORE.get(framework, {}).items():
        workload = mofa.load_workload(name, seq_len=4096, global_batch=64, overrides=overrides)
        jobs.append(jobs[0]._replace(workload=workload))
    own = [_files(drawn, to) for drawn in jobs]
    assert not [text for text in own if text.startswith("refused")]
    lost = []
    for path in (*table.represented_fields, *table.fixed, *table.facts):
        if path in ("nvls", "framework.python_functions", "framework.name") or path in DERIVED.get(to, ()):
            continue
        shown = False
        for drawn, text in zip(jobs, own, strict=True):
            value = job_of(drawn, to).value_at_path(path)
            for other in _others(path, value):
                changed = _changed(drawn, path, other)
                if changed is None:  # the framework's own record refuses it
                    shown = shown or path.startswith("framework.")
                else:
                    shown = shown or _files(changed, to) != text
        if not shown:
            lost.append(path)
    assert not lost, lost


MORE: dict[str, dict[str, dict[str, Any]]] = {
    "megatron": {
        "qwen3-30b-a3b": {
            "model.attention.window": 1024, "routing.capacity_factor": 1.25, "model.moe.num_groups": 4,
            "model.moe.groups_per_token": 2,
        },
    },
    "torchtitan": {"qwen3-30b-a3b": {"model.moe.num_groups": 4, "model.moe.groups_per_token": 2}},
}  # fmt: skip
"""Workloads with parts that change nothing alone."""
ONLY_WITH_OTHERS = ("strategy.layout", "optimizer.name", "model.attention.kind", "model.shared_branch_norm")
ONLY_WITH_REFUSED = ("routing.pad_to_capacity", "model.norm_bias", "model.attention.chunked")
DERIVED: dict[str, tuple[str, ...]] = {
    "megatron": ONLY_WITH_OTHERS,
    "megatron-bridge": ONLY_WITH_OTHERS,
    "torchtitan": (*ONLY_WITH_OTHERS, *ONLY_WITH_REFUSED),
    "torchtitan-0.3": (*ONLY_WITH_OTHERS, *ONLY_WITH_REFUSED),
}
"""Fields that the plan's own layout says, that have one value, or that change with others alone."""


def test_every_framework_says_what_it_is_exported_to() -> None:
    """The hint under a plan names what ``--to`` takes; each has its table."""
    assert {to for traits in TRAITS.values() for to in traits.exported_to} == set(job_file_makers()) == set(TABLES)


def test_the_wheels_are_those_that_files_are_written_for() -> None:
    versions = {
        "megatron_core": megatron.VERSION, "torchtitan": torchtitan.VERSION, "megatron_bridge": bridge.VERSION,
    }  # fmt: skip
    asked = {tuple(wheel.split("==")) for wheel in WHEELS}
    experimental = "torchtitan", torchtitan.EXPERIMENTAL_VERSION
    assert asked == {*versions.items(), experimental, ("mlc_chakra", chakra.PACKAGE_VERSION)}
