"""Mutations by the grammar of what is mutated: values of nested facts, lines of text, options, and bytes."""

from __future__ import annotations

import copy
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    -1, 0, 1, 2, 7, -7, 1e-320, 1e308, -1e308, 10**400, -(10**400), 2**63, 2**31, 10**9, 10**12, 0.1, 1.5, -0.0,
    float("inf"), float("-inf"), float("nan"), True, False, None, "", " ", "x", "²", "١٢", "1e400", "1e400 s", "-5 GiB",
    "1e-320 s", "0 B", "10 TB/s", "nan", "inf", "1_0", "a\x1b[31mb", "\u202ex", "=1+1", "x" * 300, "..", "/", "../x",
    "nul\0", "\ud800", "模型", [], {}, [[]], [None], [-1], {"value": -1}, {"x": 1}, [1] * 50,
)  # fmt: skip
"""Values that no field is made for, or few."""
EXTREME = (
    "0", "-0.0", "-1", "1e-320", "5e-324", "-1e-320", "2.2e-308", "1e-300", "1e-30", "1e-12", "1e-6", "0.001", "0.5",
    "1", "2", "50", "1000", "1e9", "1e12", "1e18", "1e30", "1e33", "1e34", "1e300", "1.7e308", "1e400", "-1e300", "nan",
    "inf", "-inf", "true", "false", "yes", "99999999999", "9" * 30, "9" * 400, "1_000", "0x10", "", "x", "²",
)  # fmt: skip
"""Numbers as words of a command line: tame, huge, tiny, subnormal, negative, none, and truths in their place."""
TAGS = ("!!timestamp x", "!!bool maybe", "!!int x", "!!float x", "!!binary é", "!!set {a, b}", "!!omap [b]", "!!null x",
        "!!python/object:os.system x", "&a [*a]", "*a", "<<: 3", "0x" + "f" * 500, "1:2:3", "2001-99-99", "? [a]",
        "2020-01-01", "!!str", "{", "]", "'", "%", "@", "- - - -", "|2", "\t")  # fmt: skip
"""Scalars of YAML that constructors stumble over, and broken ones."""

UNITS = (
    "B",
    "GB",
    "GiB",
    "B/s",
    "GB/s",
    "PB/s",
    "Gbit/s",
    "s",
    "ms",
    "ns",
    "d",
    "W",
    "FLOP/s",
    "TFLOPS",
    "tokens",
    "parsec",
)


def extreme(draw: random.Random, unit: str = "") -> str:
    """One of :data:`EXTREME`, mostly with its unit where it has one."""
    number = draw.choice(EXTREME)
    if not unit:
        return number
    return f"{number} {unit if draw.random() < 0.9 else draw.choice(UNITS)}" if draw.random() < 0.95 else number


Place = tuple[Any, ...]


def hostile(draw: random.Random) -> Any:
    """One of :data:`HOSTILE`, which may be changed."""
    return copy.deepcopy(draw.choice(HOSTILE))


def places(value: Any, at: Place = ()) -> list[Place]:
    """Paths of all values within nested lists and mappings, the whole one first."""
    out = [at]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        out += places(item, (*at, key))
    return out


def _parent(value: Any, place: Place) -> Any:
    for key in place[:-1]:
        value = value[key]
    return value


def _extreme_value(draw: random.Random, value: Any) -> Any:
    """An extreme number in a value's place: with its unit where that is text with one."""
    if isinstance(value, str):
        return extreme(draw, value.partition(" ")[2])
    if draw.random() < 0.2:
        return draw.random() < 0.5
    try:
        number = float(extreme(draw))
    except ValueError:
        return True
    return int(number) if isinstance(value, int) and abs(number) < 1e300 else number


def _scaled(draw: random.Random, value: Any) -> Any:
    """A number times a power of ten, or changed a little; of text with a unit the number."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        try:
            return draw.choice([value * 10 ** draw.randint(-6, 6), value + draw.choice([-1, 1]), -value, int(value)])
        except (ValueError, OverflowError):  # int(inf) and the like
            return -1
    if isinstance(value, str):
        number, space, unit = value.partition(" ")
        try:
            return f"{float(number) * 10.0 ** draw.randint(-12, 12):g}{space}{unit}"
        except (ValueError, OverflowError):
            return draw.choice([value[: draw.randint(0, len(value))], value + value, value.upper(), f" {value} "])
    return value


def truths_for_numbers(before: Any, after: Any, at: Place = ()) -> list[Place]:
    """Places where mutated facts have true or false and the sound ones a number."""
    if isinstance(after, bool):
        return [at] if isinstance(before, (int, float)) and not isinstance(before, bool) else []
    if isinstance(before, dict) and isinstance(after, dict):
        pairs = [(key, before[key], after[key]) for key in before if key in after]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = list(zip(range(len(before)), before, after, strict=True))
    else:
        return []
    return [place for key, old, new in pairs for place in truths_for_numbers(old, new, (*at, key))]


def mutated(draw: random.Random, value: Any, times: int | None = None) -> Any:
    """Nested facts with one to three of their values replaced, removed, scaled, moved, or wrapped."""
    out = copy.deepcopy(value)
    for _ in range(times or draw.choice([1, 1, 1, 2, 3])):
        place = draw.choice(places(out))
        if not place:
            if draw.random() < 0.02:
                return hostile(draw)
            continue
        parent, key = _parent(out, place), place[-1]
        kind = draw.randrange(8)
        if kind < 3:
            parent[key] = _extreme_value(draw, parent[key]) if draw.random() < 0.4 else hostile(draw)
        elif kind < 5:
            parent[key] = _scaled(draw, parent[key])
        elif kind == 5:
            del parent[key]
        elif kind == 6:
            other = draw.choice(places(out))
            if other and other != place[: len(other)]:  # nothing into itself
                parent[key] = copy.deepcopy(_parent(out, other)[other[-1]])
        elif isinstance(parent, dict):
            parent[draw.choice(["unknown", "name", "kind", f"{key}x", 7, key])] = hostile(draw)
        else:
            parent.insert(0, draw.choice([hostile(draw), copy.deepcopy(parent[key])]))
    return out


def mutated_lines(draw: random.Random, text: str, separator: str | None = None) -> str:
    """Text with words or lines replaced, doubled, dropped or swapped."""
    lines = text.split("\n")
    for _ in range(draw.choice([1, 1, 2, 4])):
        i = draw.randrange(len(lines))
        kind = draw.randrange(7)
        if kind == 0:
            del lines[i]
            lines = lines or [""]
        elif kind == 1:
            lines.insert(i, lines[draw.randrange(len(lines))])
        elif kind == 2:
            lines[i] = lines[i][: draw.randint(0, len(lines[i]))]
        else:
            cells = lines[i].split(separator)
            if cells:
                at = draw.randrange(len(cells))
                cells[at] = draw.choice([_word(draw), str(_scaled(draw, cells[at])), cells[at] + _word(draw)])
            lines[i] = (separator or " ").join(cells)
    return "\n".join(lines)


def _word(draw: random.Random) -> str:
    try:
        return str(hostile(draw))
    except ValueError:
        return "9" * 5000


def mutated_yaml(draw: random.Random, text: str) -> str:
    """YAML text with a scalar replaced by what constructors stumble over."""
    lines = text.split("\n")
    i = draw.randrange(len(lines))
    key, colon, _ = lines[i].partition(":")
    lines[i] = f"{key}{colon} {draw.choice(TAGS)}" if colon else draw.choice(TAGS)
    return "\n".join(lines)


def mutated_bytes(draw: random.Random, data: bytes) -> bytes:
    """Bytes with a few flipped, cut or inserted."""
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 3])):
        place, kind = draw.randrange(len(out) + 1), draw.randrange(3)
        if kind == 0:
            out.insert(place, draw.randrange(256))
        elif kind == 1:
            del out[place : place + draw.randint(1, 50)]
        else:
            out[place : place + 1] = bytes([draw.randrange(256)])
    return bytes(out)
