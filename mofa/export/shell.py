"""Shell scripts read for the words of a command: assignments, arrays, quotes, continuations. Nothing is run.

What a shell would have to compute (``$(...)``, what comes from outside) has no value here: a word that needs it holds
:data:`UNKNOWN` and the reason, so that whoever needs the word can refuse it. An ``if`` that
compares what the script itself sets is followed. What is set in another one, or in a loop, is an error where it is
used, not a guess; words that such a branch may add to an array begin with :data:`MAYBE`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mofa.export.shell_words import ASSIGNED, ShellError, ShellWordPart, Word, commands_of_script, plain_word_text
from mofa.units import is_whole_number

MAX_WORDS = 100_000
"""Words that are expanded, of all commands and variables together. [-]"""
MAX_CHARACTERS = 2**24
"""Of all expanded words together. [characters]"""
MAX_DEPTH = 20
"""How deep variables may name variables. [-]"""
MAX_NESTED = 100
"""How deep branches and loops may be in each other. [-]"""
UNKNOWN = "\0"
"""Begins and ends, in a word, what a shell would have to compute."""
MAYBE = "\1"
"""Begins a word that a branch may add, or not."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_OPENING = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
_CLOSING = {"fi", "done", "esac", "}"}
_COMPARED = ("-eq", "-ne", "-gt", "-ge", "-lt", "-le")
_WORDS = re.compile(r"\$?\{?\w+\}?|[*/+-]")


@dataclass
class ShellScript:
    """The commands of a script, and its variables by name as lists of words."""

    commands: list[list[Word]] = field(default_factory=list)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    undecided: set[str] = field(default_factory=set)
    """Variables that are set in an ``if``, a loop or a function."""
    expanded: int = 0
    characters: int = 0

    def expand_word(self, word: Word, depth: int = 0) -> list[str]:
        """What a word becomes, unquoted variables split at blanks.

        Raises
        ------
        ShellError
            If it names what an ``if``, a loop or a function sets, or becomes too long.
        """
        self.expanded += 1
        if self.expanded > MAX_WORDS or self.characters > MAX_CHARACTERS:
            raise ShellError(f"it becomes more than {MAX_WORDS:,} words or {MAX_CHARACTERS:,} characters; shorten it")
        if depth > MAX_DEPTH:
            raise ShellError("variables name each other in a circle; write the value itself")
        out: list[str] = []
        pending: str | None = None
        if all(piece.every or piece == ShellWordPart("", quoted=True) for piece in word) and any(p.every for p in word):
            word = tuple(piece for piece in word if piece.every)  # an array without entries is no word
        for piece in word:
            parts = self._parts(piece, depth)
            if piece.is_plain_text:
                pending = (pending or "") + piece.text
                continue
            for number, part in enumerate(parts):
                if number and pending is not None:
                    out.append(pending)
                    pending = None
                pending = (pending or "") + part
        if pending is not None:
            out.append(pending)
        self.expanded += len(out)
        self.characters += sum(len(text) for text in out)
        return out

    def _parts(self, piece: ShellWordPart, depth: int) -> list[str]:
        """The words of one piece."""
        if piece.unknown:
            return [f"{UNKNOWN}{piece.unknown[:60]} would have to be run{UNKNOWN}"]
        if piece.calculation:
            return [self._calculated(piece.calculation, depth)]
        if piece.name is None:
            return [piece.text]
        if piece.name == MAYBE:
            assert piece.default is not None
            return [f"{MAYBE}{text}" for text in self.expand_word(piece.default, depth + 1)]
        if piece.name in self.undecided:
            raise ShellError(f"${piece.name} is set in an if, a loop or a function; write its value")
        if piece.name not in self.arrays:
            if piece.default is None:
                return self._unset(piece)
            values = self.expand_word(piece.default, depth + 1)
        else:
            stored = self.arrays[piece.name]
            values = [
                text for word in (stored if piece.every else stored[:1]) for text in self.expand_word(word, depth + 1)
            ]
        if piece.quoted and not piece.every:
            return [" ".join(values)]
        return values if piece.quoted else [text for value in values for text in value.split()]

    def _unset(self, piece: ShellWordPart) -> list[str]:
        if piece.every or piece.name == "@":
            return []
        return [f"{UNKNOWN}${piece.name} is not set in the script{UNKNOWN}"]

    def _calculated(self, text: str, depth: int) -> str:
        names = {}
        for name in set(_NAME.findall(text)) & (self.arrays.keys() - self.undecided):
            names[name] = " ".join(self._parts(ShellWordPart(name=name, quoted=True), depth + 1))
        number = evaluate_whole_number(text, names)
        return f"{UNKNOWN}$(({text[:60]})) would have to be calculated{UNKNOWN}" if number is None else str(number)


def read_shell_script(text: str) -> ShellScript:
    """The commands and variables of a script.

    Raises
    ------
    ShellError
        If quotes or brackets are not closed.

    Examples
    --------
    >>> script = read_shell_script('N=2\\nARGS=(--tp $N\\n --sp)\\ntorchrun x.py "${ARGS[@]}"')
    >>> [text for word in script.commands[-1] for text in script.expand_word(word)]
    ['torchrun', 'x.py', '--tp', '2', '--sp']
    """
    script, branches = ShellScript(), _Branches()
    for command, separator in commands_of_script(text):
        words = branches.enter(script, command, separator)
        if not words or branches.skipped:
            continue
        _assign(script, words, undecided=branches.undecided)
        script.commands.append(words)
    return script


class _Branches:
    """Which of the branches around a command are taken: yes, no, or not known."""

    def __init__(self) -> None:
        self._open: list[tuple[str, bool | None, bool | None]] = []
        """Of each: what ends it, whether it is taken, and whether one before it was."""

    @property
    def skipped(self) -> bool:
        return any(taken is False for _, taken, _ in self._open)

    @property
    def undecided(self) -> bool:
        return any(taken is None for _, taken, _ in self._open)

    def enter(self, script: ShellScript, command: list[Word], separator: str) -> list[Word]:
        """The command without the words that open and close branches, which are followed."""
        if len(self._open) > MAX_NESTED:
            raise ShellError(f"branches are in each other more than {MAX_NESTED} deep; write the values themselves")
        words = command
        while words:
            first = plain_word_text(words[0])
            if first in _CLOSING and self._open:
                self._open.pop()
            elif first in ("if", "elif"):
                self._condition(script, words, first, separator)
                return []
            elif first == "else" and self._open:
                self._next_branch(True)
            elif first in _OPENING:
                if first in ("for", "select") and len(words) > 1:
                    script.undecided.add(plain_word_text(words[1]))
                self._open.append((_OPENING[first], None, None))
                if first != "{":
                    return []
            elif first not in ("then", "do", "!", "time", "exec"):
                return words
            words = words[1:]
        return words

    def _condition(self, script: ShellScript, words: list[Word], first: str, separator: str) -> None:
        holds = None if self.skipped and first == "if" else _holds(script, words[1:])
        if (separator == "|" and holds is not True) or (separator == "&" and holds is not False):
            holds = None  # it depends on what follows
        if first == "if":
            self._open.append(("fi", holds, holds))
        elif self._open:
            self._next_branch(holds)

    def _next_branch(self, holds: bool | None) -> None:
        end, _, before = self._open.pop()
        taken = False if before or holds is False else None if before is None else holds
        past = True if before or holds else None if before is None or holds is None else False
        self._open.append((end, taken, past))


def _holds(script: ShellScript, words: list[Word]) -> bool | None:
    """Whether a comparison holds; None where a shell would have to find out."""
    try:
        parts = [script.expand_word(word) or [""] for word in words]
    except ShellError:
        return None
    texts = [" ".join(part) for part in parts]
    if len(texts) < 3 or texts[0] not in ("[", "[[") or any(UNKNOWN in text for text in texts):
        return None
    inside = texts[1:-1]
    if len(inside) == 2 and inside[0] in ("-n", "-z"):
        return bool(inside[1]) == (inside[0] == "-n")
    if len(inside) == 3 and inside[1] in ("=", "==", "!=") and "*" not in inside[2]:
        return (inside[0] == inside[2]) == (inside[1] != "!=")
    if len(inside) == 3 and inside[1] in _COMPARED and is_whole_number(inside[0]) and is_whole_number(inside[2]):
        left, right = int(inside[0]), int(inside[2])
        return {"-eq": left == right, "-ne": left != right, "-gt": left > right, "-ge": left >= right,
                "-lt": left < right, "-le": left <= right}[inside[1]]  # fmt: skip
    return None


def _assign(script: ShellScript, words: list[Word], undecided: bool) -> None:
    """Take the assignments that a command begins with, or that export and its like are followed by."""
    declared = plain_word_text(words[0]) in ("export", "declare", "local", "readonly", "typeset")
    for word in words[1:] if declared else words:
        match = ASSIGNED.match(word[0].text) if word and word[0].is_plain_text else None
        if match is None:
            if declared:
                continue
            return
        name, adds = match[1], bool(match[2])
        entries = word[-1].entries
        before = script.arrays.get(name, []) if adds else []
        if entries is not None:
            added = [
                (ShellWordPart(name=MAYBE, default=entry, quoted=True, every=True),) if undecided and adds else entry
                for entry in entries
            ]
            script.arrays[name] = [*before, *added]
        else:
            rest = ShellWordPart(word[0].text[match.end() :], quoted=word[0].quoted)
            value = tuple(piece for piece in (rest, *word[1:]) if piece != ShellWordPart(""))
            settled = (*(before[0] if before else ()), *_settled(script, name, value))
            if len(settled) > MAX_WORDS:
                raise ShellError(f"${name} becomes more than {MAX_WORDS:,} parts; shorten it")
            script.arrays[name] = [settled]
        if undecided and not (adds and entries is not None):
            script.undecided.add(name)
        elif not adds and all(piece.name != name for piece in word):
            script.undecided.discard(name)


def _settled(script: ShellScript, name: str, value: Word) -> Word:
    """A value that names its own variable with what that was before."""
    out: list[ShellWordPart] = []
    for piece in value:
        if piece.name == name:
            out += script.arrays.get(name, [piece.default or ()])[0]
        else:
            out.append(piece)
    return tuple(out)


def evaluate_whole_number(text: str, names: Mapping[str, str]) -> int | None:
    """The whole number that a text or a calculation says, of sums or of products; None where it says none.

    >>> texts = ("2 * N", "8", "x", "1 + 2 * 3")
    >>> tuple(evaluate_whole_number(text, {"N": "4"}) for text in texts)
    (8, 8, None, None)
    """
    words = _WORDS.findall(text)
    if "".join(words) != re.sub(r"\s", "", text) or len(words) % 2 == 0:
        return None
    values = [names.get(word.strip("${}"), word) for word in words[::2]]
    operators = words[1::2]
    if not all(is_whole_number(value) for value in values) or not (
        set(operators) <= set("+-") or set(operators) <= set("*/")
    ):
        return None
    total = int(values[0])
    for operator, value in zip(operators, values[1:], strict=True):
        number = int(value)
        if operator == "/" and not number:
            return None
        total = {"+": total + number, "-": total - number, "*": total * number, "/": total // max(number, 1)}[operator]
    return total
