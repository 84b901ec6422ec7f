"""What both directions know about a framework's arguments: rows that say mofa's fields in them, and read them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mofa.errors import SpecError
from mofa.export.job import ExportJob
from mofa.specs.files import shown_value
from mofa.specs.load import load_framework

Kind = Literal["int", "float", "text", "flag", "off", "ints", "texts"]
"""How an argument is written: with a value, with several, or as a switch; ``off`` switches off what is on without."""


@dataclass(frozen=True)
class Argument:
    """One argument of a framework: its name, type and default as its source has them."""

    name: str
    kind: Kind
    default: Any = None
    stored_as: str = ""
    """Its name in a dump of all arguments, where it is not the name itself."""
    aliases: tuple[str, ...] = ()
    """Other names for it."""

    @property
    def dump_name(self) -> str:
        """Its name in a dump of all arguments.

        >>> Argument("no-rope-fusion", "off", True, "apply_rope_fusion").dump_name, Argument("lr", "float").dump_name
        ('apply_rope_fusion', 'lr')
        """
        return self.stored_as or self.name.replace("-", "_")


class GivenArguments:
    """The arguments of a job that somebody has, each with its default where it is absent.

    Parameters
    ----------
    values
        By name of the argument, typed.
    table
        Whose defaults.
    where
        The file, for messages.
    num_gpus
        GPUs of the job, where something says them. [-]
    """

    def __init__(
        self, values: Mapping[str, Any], table: ArgumentTable, where: str, num_gpus: int | None = None
    ) -> None:
        self.values, self.where, self.num_gpus, self._table = dict(values), where, num_gpus, table

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name, self._table.argument_named(name).default)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def required_value(self, name: str) -> Any:
        """The value of an argument that has no default.

        Raises
        ------
        SpecError
            If it is absent.
        """
        if (value := self[name]) is None:
            raise self.refusal(f"{name} is missing", "a job cannot be read without it; add it")
        return value

    def refusal(self, what: str, why: str) -> SpecError:
        """The one line that says why this job cannot be read."""
        return SpecError(f"{self.where}: {what}; {why}")


@dataclass(frozen=True)
class FieldRow:
    """Fields of mofa and the arguments that say them, in both directions."""

    fields: tuple[str, ...]
    """Dotted paths below a job: ``strategy.tp``, ``model.hidden``, ``framework.grads``."""
    arguments: tuple[Argument, ...]
    write: Callable[[ExportJob], Mapping[str, Any]]
    """Values of the arguments, without those that stay at their defaults."""
    read: Callable[[GivenArguments], Mapping[str, Any]]
    """Values of the fields."""


@dataclass(frozen=True)
class FixedField:
    """A field that no argument says: it must have a value that the framework runs with."""

    allowed: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class AssumedArgument:
    """A value of an argument that the prediction rests on and no field of mofa says."""

    argument: Argument
    value: Any
    why: str
    of_experts: bool = False
    """Whether it has no meaning for models without experts."""


@dataclass(frozen=True)
class UnmodelledArgument:
    """An argument that matters and is not modelled: a job that gives it another value than these is refused."""

    neutral: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class ArgumentTable:
    """All that is known of one framework's arguments."""

    framework: str
    rows: tuple[FieldRow, ...]
    fixed: Mapping[str, FixedField]
    facts: Mapping[str, str]
    """Fields of the framework that describe what it does: an export needs the profile's own value. Why no argument
    says them."""
    free: Mapping[str, str]
    """Fields of any value that no argument says, and why none does."""
    assumed: tuple[AssumedArgument, ...] = ()
    unmodelled: Mapping[str, UnmodelledArgument] = field(default_factory=dict)

    @property
    def represented_fields(self) -> tuple[str, ...]:
        """Fields that arguments say."""
        return tuple(name for row in self.rows for name in row.fields)

    @property
    def arguments(self) -> dict[str, Argument]:
        """All arguments of the table by name."""
        listed = [a for row in self.rows for a in row.arguments] + [given.argument for given in self.assumed]
        return {argument.name: argument for argument in listed}

    def argument_named(self, name: str) -> Argument:
        """The argument of a name."""
        return self.arguments[name]

    def write_arguments(self, job: ExportJob) -> dict[str, Any]:
        """The arguments of a job by name, those of its fields first, then those that the prediction rests on.

        Raises
        ------
        SpecError
            If choices of the job have no argument; it says which, all of them, and why.
        """
        refusals = list(self._what_no_argument_says(job))
        values: dict[str, Any] = {}
        for row in self.rows:
            try:
                values |= row.write(job)
            except SpecError as error:
                refusals.append(error)
        if refusals:
            raise job.refusals(refusals)
        for given in self.assumed:
            if job.model.moe is not None or not given.of_experts:
                values.setdefault(given.argument.name, given.value)
        return values

    def _what_no_argument_says(self, job: ExportJob) -> Iterator[SpecError]:
        for name, fixed in self.fixed.items():
            value = job.value_at_path(name)
            if value not in fixed.allowed:
                usual = " or ".join(_word(allowed) for allowed in fixed.allowed)
                yield job.refusal(f"{name} ({_word(value)})", f"{fixed.why}; use {usual}")
        profile = load_framework(job.framework.name)
        for name, why in self.facts.items():
            usual = getattr(profile, name.partition(".")[2])
            if (value := job.value_at_path(name)) != usual:
                yield job.refusal(f"{name} ({_word(value)})", f"{why}; use {_word(usual)}, as the profile has it")

    def read_fields(self, given: GivenArguments) -> dict[str, Any]:
        """Values of all fields that the arguments say.

        Raises
        ------
        SpecError
            If an argument matters and is not modelled, or a value is one that mofa does not have.
        """
        for name, rule in self.unmodelled.items():
            if name in given.values and given.values[name] not in rule.neutral:
                raise given.refusal(f"{name} ({_word(given.values[name])}) is not modelled", rule.why)
        fields: dict[str, Any] = {}
        for row in self.rows:
            fields |= row.read(given)
        return fields

    def differences_from_assumptions(self, given: GivenArguments, has_experts: bool) -> tuple[str, ...]:
        """Where a job differs from what predictions assume, in words."""
        out = []
        for rule in self.assumed:
            name = rule.argument.name
            if (has_experts or not rule.of_experts) and (value := given[name]) != rule.value:
                if rule.argument.kind in ("flag", "off"):
                    given_words = "given" if value != rule.argument.default else "not given"
                    out.append(f"{name} is {given_words}, predicted otherwise: {rule.why}")
                else:
                    out.append(f"{name} is {_word(value)}, predicted as with {_word(rule.value)}: {rule.why}")
        return tuple(out)


def _word(value: Any) -> str:
    """A value as a message shows it."""
    return (
        "none"
        if value is None or value == ""
        else str(value).lower()
        if isinstance(value, bool)
        else shown_value(value)
    )


def same_value_row(path: str, argument: Argument) -> FieldRow:
    """A field and an argument that have the same values; a field that is absent stays unwritten."""

    def write(job: ExportJob) -> Mapping[str, Any]:
        return {} if (value := job.value_at_path(path)) is None else {argument.name: value}

    return FieldRow((path,), (argument,), write, lambda given: {path: given[argument.name]})


def required_row(path: str, argument: Argument) -> FieldRow:
    """A field and an argument of the same values that a job cannot be without."""
    return FieldRow(
        (path,), (argument,), lambda job: {argument.name: job.value_at_path(path)},
        lambda given: {path: given.required_value(argument.name)},
    )  # fmt: skip


def switch_row(path: str, argument: Argument) -> FieldRow:
    """A truth and a switch, which is written where the truth is not its default."""

    def write(job: ExportJob) -> Mapping[str, Any]:
        return {} if (value := bool(job.value_at_path(path))) == argument.default else {argument.name: value}

    return FieldRow((path,), (argument,), write, lambda given: {path: bool(given[argument.name])})


def translated_row(path: str, argument: Argument, names: Mapping[Any, Any]) -> FieldRow:
    """A field and an argument with words of their own, mofa's to the framework's; a switch is written if it is on."""

    def write(job: ExportJob) -> Mapping[str, Any]:
        if (value := job.value_at_path(path)) not in names:
            usual = " or ".join(str(name) for name in names)
            raise job.refusal(f"{path} ({_word(value)})", f"{argument.name} has no word for it; use {usual}")
        is_off = argument.kind in ("flag", "off") and names[value] == argument.default
        return {} if is_off else {argument.name: names[value]}

    def read(given: GivenArguments) -> Mapping[str, Any]:
        value = given[argument.name]
        for own, word in names.items():
            if word == value:
                return {path: own}
        known = " or ".join(_word(word) for word in names.values())
        raise given.refusal(f"{argument.name} ({_word(value)}) is not modelled", f"what is: {known}")

    return FieldRow((path,), (argument,), write, read)


def rows_if_present(
    present: Callable[[ExportJob], bool], given_has: Callable[[GivenArguments], bool], rows: Iterable[FieldRow]
) -> tuple[FieldRow, ...]:
    """Rows of a part that some models lack: nothing is written or read without it."""

    def part(row: FieldRow) -> FieldRow:
        return FieldRow(
            row.fields, row.arguments, lambda job: row.write(job) if present(job) else {},
            lambda given: row.read(given) if given_has(given) else {},
        )  # fmt: skip

    return tuple(part(row) for row in rows)
