"""Text of users as it is shown: what a terminal, a table or a drawing would act on is written out."""

from __future__ import annotations

from functools import lru_cache

FORMULA_BEGINS = ("=", "+", "-", "@", "\t", "\r")
"""What begins a formula in a spreadsheet."""


@lru_cache(maxsize=4096)
def escape_invisible(text: str, *, lines: bool = False) -> str:
    """A text with control characters, marks of direction and lone surrogates written as escapes.

    Parameters
    ----------
    text
        Any text.
    lines
        Whether ends of lines stay.

    Examples
    --------
    >>> escape_invisible("a\x1b[31m b\u202e"), escape_invisible("llama3-8b")
    ('a\\\\x1b[31m b\\\\u202e', 'llama3-8b')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") or c == "\u3000" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if character.isspace() and ord(character) > 0x9F and character not in "\u2028\u2029":
        return " "  # a space of another width
    return character.encode("unicode_escape").decode("ascii")


def escape_spreadsheet_formula(text: str) -> str:
    """A text that no spreadsheet reads as a formula: led by an apostrophe where one would.

    Numbers with a sign are no formulas.

    Examples
    --------
    >>> escape_spreadsheet_formula("=1+1"), escape_spreadsheet_formula("-1.5e3"), escape_spreadsheet_formula("tp=8")
    ("'=1+1", '-1.5e3', 'tp=8')
    """
    if not text.startswith(FORMULA_BEGINS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
