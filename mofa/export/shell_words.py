"""The words of a shell script: quotes, variables, arrays, comments and continuations, character by character."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

_NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
"""Begins an assignment: a name, and whether it adds."""
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_PLAIN = re.compile(r"[^ \t\n;&|()<>'\"\\`$]+")
_PLAIN_QUOTED = re.compile(r"[^\"\\`$]+")


class ShellError(ValueError):
    """A script that cannot be read, or a word of it whose value depends on what is run."""


@dataclass(frozen=True)
class ShellWordPart:
    """A part of a word: text, or a variable (``name``) with what stands for it where it is unset."""

    text: str = ""
    name: str | None = None
    default: tuple[ShellWordPart, ...] | None = None
    quoted: bool = False
    every: bool = False
    """All entries of an array, each a word: ``${NAME[@]}``."""
    unknown: str = ""
    """What a shell would have to run for it."""
    calculation: str = ""
    """What is inside of ``$((...))``."""

    entries: tuple[tuple[ShellWordPart, ...], ...] | None = None
    """Words of an array that is assigned."""

    @property
    def is_plain_text(self) -> bool:
        """Whether it is what it says."""
        return self.name is None and not self.unknown and not self.calculation and self.entries is None


Word = tuple[ShellWordPart, ...]


class _Scanner:
    """One pass over a script's characters."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0

    def end(self) -> bool:
        return self.place >= len(self.text)

    def peek(self, ahead: int = 0) -> str:
        at_place = self.place + ahead
        return self.text[at_place] if at_place < len(self.text) else ""

    def word(self) -> Word:
        """The word that begins here."""
        pieces: list[ShellWordPart] = []
        while not self.end() and self.peek() not in " \t\n;&|()<>":
            character = self.peek()
            if character == "'":
                pieces.append(ShellWordPart(self._until_quote(), quoted=True))
            elif character == '"':
                pieces += self._double_quoted()
            elif character == "\\":
                pieces.append(ShellWordPart(self.peek(1), quoted=True))
                self.place += 2
            elif character == "`":
                pieces.append(ShellWordPart(unknown=self._backticks()))
            elif character == "$":
                pieces.append(self._variable(quoted=False))
            else:
                pieces.append(ShellWordPart(self._run(_PLAIN)))
        return _joined(pieces)

    def _until_quote(self) -> str:
        end = self.text.find("'", self.place + 1)
        if end < 0:
            raise ShellError(f"line {self._line()}: a quote is not closed")
        text, self.place = self.text[self.place + 1 : end], end + 1
        return text

    def _backticks(self) -> str:
        end = self.text.find("`", self.place + 1)
        if end < 0:
            raise ShellError(f"line {self._line()}: a backtick is not closed")
        text, self.place = self.text[self.place : end + 1], end + 1
        return text

    def _double_quoted(self) -> list[ShellWordPart]:
        self.place += 1
        pieces = [ShellWordPart("", quoted=True)]
        while self.peek() != '"':
            if self.end():
                raise ShellError(f"line {self._line()}: a quote is not closed")
            if self.peek() == "\\" and self.peek(1) in '"\\$`':
                pieces.append(ShellWordPart(self.peek(1), quoted=True))
                self.place += 2
            elif self.peek() == "`":
                pieces.append(ShellWordPart(unknown=self._backticks()))
            elif self.peek() == "$":
                pieces.append(self._variable(quoted=True))
            else:
                pieces.append(ShellWordPart(self._run(_PLAIN_QUOTED) or self._character(), quoted=True))
        self.place += 1
        return pieces

    def _run(self, pattern: re.Pattern[str]) -> str:
        """What of the text from here on matches."""
        match = pattern.match(self.text, self.place)
        self.place = match.end() if match is not None else self.place
        return match[0] if match is not None else ""

    def _character(self) -> str:
        """The character here."""
        self.place += 1
        return self.text[self.place - 1]

    def _variable(self, quoted: bool) -> ShellWordPart:
        """A variable, or what stands for one, at a dollar."""
        start = self.place
        self.place += 1
        if self.peek() == "(":
            text = self._balanced("(", ")")
            if text.startswith("((") and text.endswith("))"):
                return ShellWordPart(calculation=text[2:-2], quoted=quoted)
            return ShellWordPart(unknown="$" + text)
        if self.peek() == "{":
            return self._braced(self._balanced("{", "}")[1:-1], quoted)
        match = _NAME.match(self.text, self.place)
        if match is not None:
            self.place = match.end()
            return ShellWordPart(name=match[0], quoted=quoted)
        if self.peek() in "@*":
            self.place += 1
            return ShellWordPart(name="@", every=True, quoted=quoted)
        if self.peek() and self.peek() in "#?$!0123456789-":
            self.place += 1
            return ShellWordPart(unknown=self.text[start : self.place])
        return ShellWordPart("$", quoted=True)

    def _braced(self, inside: str, quoted: bool) -> ShellWordPart:
        match = re.fullmatch(r"([A-Za-z_]\w*|\d|@)(\[[@*]\])?(?::?[-=](.*))?", inside, re.DOTALL)
        if match is None:
            return ShellWordPart(unknown="${" + inside + "}")
        default = None
        if match[3] is not None:
            scanner = _Scanner('"' + match[3].replace('"', "") + '"')
            default = scanner.word()
        return ShellWordPart(name=match[1], default=default, quoted=quoted, every=bool(match[2]) or match[1] == "@")

    def _balanced(self, opening: str, closing: str) -> str:
        depth, start = 0, self.place
        while not self.end():
            depth += (self.peek() == opening) - (self.peek() == closing)
            self.place += 1
            if depth == 0:
                return self.text[start : self.place]
        raise ShellError(f"line {self._line()}: {opening} is not closed")

    def _line(self) -> int:
        return self.text.count("\n", 0, self.place) + 1


def _joined(pieces: list[ShellWordPart]) -> Word:
    """Pieces of plain text put together."""
    out: list[ShellWordPart] = []
    for (is_text, quoted), run in groupby(pieces, key=lambda piece: (piece.is_plain_text, piece.quoted)):
        same = list(run)
        out += [ShellWordPart("".join(piece.text for piece in same), quoted=quoted)] if is_text else same
    return tuple(out)


def plain_word_text(word: Word) -> str:
    """A word's text where it is nothing but text."""
    return "".join(piece.text for piece in word) if all(piece.is_plain_text for piece in word) else ""


def commands_of_script(text: str) -> Iterator[tuple[list[Word], str]]:
    """Each command of a script with the character that ends it."""
    scanner = _Scanner(_without_heredocs(re.sub(r"\\\r?\n", " ", text.replace("\r\n", "\n"))))
    words: list[Word] = []
    while not scanner.end():
        character = scanner.peek()
        if character in " \t":
            scanner.place += 1
        elif character == "#":
            newline = scanner.text.find("\n", scanner.place)
            scanner.place = len(scanner.text) if newline < 0 else newline
        elif character in "\n;&|()":
            scanner.place += 1
            if words:
                yield words, character
            words = []
        elif character in "<>":
            scanner.place += 1
        else:
            word = scanner.word()
            match = ASSIGNED.fullmatch(plain_word_text(word))
            if match is not None and scanner.peek() == "(":
                words.append((*word, ShellWordPart(entries=_array_entries(scanner, match[1]))))
            else:
                words.append(word)
    if words:
        yield words, ""


def _array_entries(scanner: _Scanner, name: str) -> tuple[Word, ...]:
    """The words of an array, which begins here."""
    scanner.place += 1
    entries: list[Word] = []
    while scanner.peek() != ")":
        if scanner.end():
            raise ShellError(f"the array {name} is not closed")
        if scanner.peek() in " \t\n":
            scanner.place += 1
        elif scanner.peek() == "#":
            newline = scanner.text.find("\n", scanner.place)
            scanner.place = len(scanner.text) if newline < 0 else newline
        elif scanner.peek() in ";&|(<>":
            raise ShellError(f"the array {name} has {scanner.peek()!r} in it, which is not read; write words alone")
        else:
            entries.append(scanner.word())
    scanner.place += 1
    return tuple(entries)


def _without_heredocs(text: str) -> str:
    """A script without the lines that are another program's input."""
    out, end = [], ""
    for line in text.split("\n"):
        if end:
            end = "" if line.strip() == end else end
            continue
        match = _HEREDOC.search(line)
        if match is not None and not line.lstrip().startswith("#"):
            end, line = match[2], line[: match.start()]
        out.append(line)
    return "\n".join(out)
