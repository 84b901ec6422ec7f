"""Docstrings as Markdown of the documentation's site: roles become links, bare examples become code.

Fields of pydantic records are shown with the descriptions that they carry.

mkdocs.yml names this file under mkdocstrings' ``extensions``. What a role such as ``:func:`name``` names is looked up
where the docstring stands: in its class, its module, the one module beside it that has it, or by the whole dotted name.
A name that nothing has stays a link, of which the strict build complains; what has no docstring, and so no place to
link to, is shown as code, as are modules of other projects.
"""

from __future__ import annotations

import ast
import re
from functools import partial
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|mod|meth|data|attr|exc|obj):`(~?)([\w.]+)`")
EXAMPLE = re.compile(r"^>>> .*\n?(?:.+\n?)*", re.MULTILINE)

ENTRIES = re.compile(r"(^(?:Parameters|Attributes)\n-{3,}\n)((?:\w.*\n(?: .*(?:\n|$)|\n(?= ))+)+)", re.MULTILINE)
"""A section that lists names with indented text below them: its title, its entries."""
GROUP = re.compile(r"^(\w+(?:, \w+)+)\n((?: .*(?:\n|$)|\n(?= ))+)", re.MULTILINE)
"""Several names with one text."""


def target_of(name: str, where: griffe.Object) -> str:
    """The whole dotted name of what ``name`` means in the docstring of ``where``; ``name`` where nothing has it."""
    if name.startswith("."):
        parent = where.module.parent
        if parent is None or (where.is_module and where.is_init_module):
            return f"{where.package.path}{name}"
        return f"{parent.path}{name}"
    head, _, rest = name.partition(".")
    if head == where.package.path:
        return name
    try:
        found = where.resolve(head)
    except griffe.NameResolutionError:
        beside = [m for m in _modules_beside(where) if head in m.members and not m.members[head].is_alias]
        if len(beside) != 1:
            return name
        found = f"{beside[0].path}.{head}"
    return f"{found}.{rest}" if rest else found


def _modules_beside(where: griffe.Object) -> list[griffe.Module]:
    """The modules of the folder that ``where`` is in."""
    folder = where.module if where.module.is_init_module else where.module.parent
    return [m for m in (folder.modules.values() if folder else ()) if isinstance(m, griffe.Module)]


def link(role: re.Match[str], where: griffe.Object) -> str:
    """The Markdown of a role in the docstring of ``where``."""
    short, name = role.group(1), role.group(2)
    shown = f"`{name.rpartition('.')[2] if short else name.lstrip('.')}`"
    path = target_of(name, where)
    package, _, below = path.partition(".")
    if package != where.package.path:
        return shown if below and package.islower() else f"[{shown}][{path}]"
    try:
        target = where.package[below] if below else where.package
    except KeyError:
        return f"[{shown}][{path}]"
    return f"[{shown}][{target.canonical_path}]" if _has_a_place(target) else shown


def _has_a_place(target: griffe.Object | griffe.Alias) -> bool:
    """Whether the site shows it: public, with a docstring."""
    return not target.name.startswith("_") and target.has_docstring


def fenced_examples(text: str) -> str:
    """Doctests that stand outside an Examples section, in fences; the section's own parser finds the others.

    >>> fenced_examples("Half of it.\\n\\n>>> half(2)\\n1\\n")
    'Half of it.\\n\\n```pycon\\n>>> half(2)\\n1\\n```\\n'
    """
    before, section, after = text.partition("\nExamples\n---")
    return EXAMPLE.sub(lambda block: f"```pycon\n{block.group().rstrip()}\n```\n", before) + section + after


def one_entry_each(text: str) -> str:
    """A docstring whose parameters and attributes stand alone, so that each is shown with its own type.

    >>> print(one_entry_each("Parameters\\n----------\\nlow, high\\n    Ends.\\n\\nNotes\\n-----\\nNone."))
    Parameters
    ----------
    low
        Ends.
    high
        Ends.
    <BLANKLINE>
    Notes
    -----
    None.
    """

    def split(entry: re.Match[str]) -> str:
        return "".join(f"{name}\n{entry[2]}" for name in entry[1].split(", "))

    return ENTRIES.sub(lambda section: section[1] + GROUP.sub(split, section[2]), text)


def describe_field(attribute: griffe.Attribute) -> None:
    """Take what pydantic's ``Field(description=...)`` says for a field's docstring, and its default for its value."""
    value = attribute.value
    if attribute.docstring is not None or not isinstance(value, griffe.ExprCall):
        return
    given = {item.name: item.value for item in value.arguments if isinstance(item, griffe.ExprKeyword)}
    try:
        description = str(ast.literal_eval(str(given["description"])))
    except (KeyError, SyntaxError, ValueError):  # none, or one that is put together when it runs
        return
    attribute.docstring = griffe.Docstring(description, parent=attribute)
    attribute.value = given.get("default")


class SiteDocstrings(griffe.Extension):
    """Rewrites all docstrings of a package once it is read, and takes the descriptions of fields for theirs."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstrings of a package's own objects; aliases are other objects' names."""
        pending: list[griffe.Object] = [pkg]
        while pending:
            where = pending.pop()
            if isinstance(where, griffe.Attribute):
                describe_field(where)
            if where.docstring is not None:
                text = ROLE.sub(partial(link, where=where), where.docstring.value)
                where.docstring.value = one_entry_each(fenced_examples(text))
            pending += [member for member in where.members.values() if isinstance(member, griffe.Object)]
