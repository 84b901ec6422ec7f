"""Text of users as it is shown: what a terminal, a table or a drawing would act on is written out."""

from __future__ import annotations

import re
import unicodedata
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


def escape_file_text(text: str) -> str:
    r"""Text of a file, or a result on standard output, with what acts on a terminal or an editor written as in JSON.

    These are control characters and marks of direction. Ends of lines, tabs and spaces of all widths stay, and what
    JSON says stays the same.

    Examples
    --------
    >>> print(escape_file_text('{"name": "a\u202e\x7f"}'))
    {"name": "a\u202e\u007f"}
    """
    codes = {ord(c): _as_in_json(c) for c in set(text) if _is_acting(c)}
    shown = text.translate(codes) if codes else text
    return re.sub(r"\r(?!\n)", r"\\u000d", shown) if "\r" in shown else shown


def escape_file_bytes(content: bytes) -> bytes:
    """The same of what goes into a file; what is no text, such as a drawing, as it is.

    Examples
    --------
    >>> escape_file_bytes(bytes([97, 27])), escape_file_bytes(bytes([0x89, 27]))
    (b'a\\\\u001b', b'\\x89\\x1b')
    """
    if content.isascii() and not _ACTING_ASCII.search(content):
        return content
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content
    return escape_file_text(text).encode()


_ACTING_ASCII = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")


def _is_acting(character: str) -> bool:
    return not (character.isprintable() or character in "\n\t\r" or unicodedata.category(character) == "Zs")


def _as_in_json(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


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
