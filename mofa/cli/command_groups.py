"""The commands of ``mofa``: a visible list, each imported when it is asked for; grouped in ``mofa --help``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

PANELS = {
    "Plan": ("plan", "sweep", "report", "serve", "estimate", "compare", "factors", "goodput", "export", "trace"),
    "Describe": ("show", "new", "schema"),
    "Calibrate": ("calibrate", "measure"),
    "Develop": ("validate", "attribute", "balance", "chunks"),
}
"""Commands by what they are for; those of research and of mofa's own development come last. Each is a function, or a
group of commands, of its name in a file of its name in ``mofa/cli/commands``."""


class UncutCommandList(TyperGroup):
    """A list of commands whose sentences are not cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under one heading."""
        self._write_section(ctx, formatter, "Commands", self.list_commands(ctx))

    def command_help_text(self, ctx: Any, name: str) -> str:
        """What a command says of itself."""
        command = self.get_command(ctx, name)
        return str(command.help or "") if command is not None else ""

    def _write_section(self, ctx: Any, formatter: Any, title: str, names: Iterable[str]) -> None:
        rows = [(name, " ".join(self.command_help_text(ctx, name).split("\n\n")[0].split())) for name in names]
        with formatter.section(title):
            formatter.write_dl(rows)


class GroupedCommands(UncutCommandList):
    """The commands of :data:`PANELS` under their headings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = CommandsOnDemand()  # type: ignore[assignment]  # nothing puts any into it

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return list(self.commands)

    def command_help_text(self, ctx: Any, name: str) -> str:
        """What a command says of itself; its options are not read for that, which takes longest."""
        command = load_command(name)
        return str(command.info.help) if isinstance(command, typer.Typer) else inspect.getdoc(command) or ""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each heading with its commands."""
        for title, names in PANELS.items():
            self._write_section(ctx, formatter, title, names)


class CommandsOnDemand(Mapping[str, Any]):
    """Commands by name, each read when it is first asked for."""

    def __init__(self) -> None:
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            if name not in [*self]:
                raise KeyError(name)
            self._read[name] = _with_options(name, load_command(name))
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return (name for names in PANELS.values() for name in names)

    def __len__(self) -> int:
        return sum(map(len, PANELS.values()))


def load_command(name: str) -> Any:
    """The function of a command, or its group of commands, as its file has it."""
    return getattr(import_module(f"mofa.cli.commands.{name}"), name)


def _with_options(name: str, written: Any) -> Any:
    """A command with its options, as the command line asks for it."""
    group = written
    if not isinstance(written, typer.Typer):
        group = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        group.command(name)(written)
    command = typer.main.get_command(group)
    command.name = name
    return command
