"""The list of commands in ``mofa --help``: grouped by what they are for, with whole sentences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperGroup

PANELS = {
    "Plan": ("plan", "estimate", "compare", "goodput", "export", "trace"),
    "Describe": ("show", "new", "schema"),
    "Calibrate": ("calibrate", "measure"),
    "Develop": ("validate", "attribute", "balance", "chunks"),
}
"""Commands by what they are for; those of research and of mofa's own development come last."""


class WholeCommands(TyperGroup):
    """A list of commands whose sentences are not cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under one heading."""
        self._write_section(ctx, formatter, "Commands", self.list_commands(ctx))

    def _write_section(self, ctx: Any, formatter: Any, title: str, names: Iterable[str]) -> None:
        rows = []
        for name in names:
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, " ".join(str(command.help or "").split("\n\n")[0].split())))
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


class GroupedCommands(WholeCommands):
    """A list of commands under headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each heading with its commands; a command of none is under the last."""
        named = {name for names in PANELS.values() for name in names}
        rest = tuple(name for name in self.list_commands(ctx) if name not in named)
        for title, names in PANELS.items():
            self._write_section(ctx, formatter, title, (*names, *rest) if title == list(PANELS)[-1] else names)
