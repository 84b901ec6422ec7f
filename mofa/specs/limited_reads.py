"""Files read no further than a bound, with whatever the system or a parser says as one line."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.specs.regular_files import refuse_special_file

_files_read: ContextVar[set[tuple[int, int]] | None] = ContextVar("files_read", default=None)
"""Files that a command has read, by device and inode; None where nobody asks."""
_result_places: ContextVar[dict[tuple[int, int], str] | None] = ContextVar("result_places", default=None)
"""Files that results will replace, by device and inode, with the words in which reading one is refused."""


@contextmanager
def remember_read_files() -> Iterator[None]:
    """While it lasts, files that are read are remembered, so that none of them is overwritten with a result."""
    read, places = _files_read.set(set()), _result_places.set({})
    try:
        yield
    finally:
        _files_read.reset(read)
        _result_places.reset(places)


def expect_results_in(places: Mapping[tuple[int, int], str]) -> None:
    """Refuse from now on to read files that results will replace, each with its own words: before the work is done."""
    expected = _result_places.get()
    if expected is not None:
        expected.update(places)


def was_read(path: Path) -> bool:
    """Whether a file was read since :func:`remember_read_files` began."""
    files = _files_read.get()
    if not files:
        return False
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    return (status.st_dev, status.st_ino) in files


def error_reason(error: Exception) -> str:
    """What the system says of a path, on one line, without the path."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())[:80]


def is_folder(path: Path) -> bool:
    """As :meth:`pathlib.Path.is_dir`; False too where the system refuses to say, or the name is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_plain_file(path: Path) -> bool:
    """As :meth:`pathlib.Path.is_file`; False too where the system refuses to say, or the name is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """As :meth:`pathlib.Path.exists`; False too where the system refuses to say, or the name is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def refuse_unreachable(path: Path, where: str) -> None:
    """Refuse a path of which the system does not say whether it is there, with its reason.

    Raises
    ------
    SpecError
        Of a folder without permission, a loop of links, a name that is too long.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return
    except OSError as error:
        raise SpecError(
            f"{where}: cannot be read ({error_reason(error)}); check the path and its permissions"
        ) from None


def read_bytes(path: str | Path, where: str, limit: int, advice: str = "check the path") -> bytes:
    """What a file holds, at most ``limit`` bytes of it.

    Raises
    ------
    SpecError
        Beginning with ``where``: if it is missing, a folder, larger, or the system refuses. ``advice`` is what to do
        about a file that is too large.
    """
    refuse_special_file(path, where)
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            if words := (_result_places.get() or {}).get((status.st_dev, status.st_ino)):
                raise SpecError(words)
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise SpecError(f"{where}: no such file; check the path") from None
    except IsADirectoryError:
        raise SpecError(f"{where}: is a folder; name a file in it") from None
    except SpecError:
        raise
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{where}: cannot be read ({error_reason(error)}); check the path and its permissions"
        ) from None
    if len(data) > limit:
        size = f"{limit >> 20} MiB" if limit >= 2**20 else f"{limit >> 10} KiB"
        raise SpecError(f"{where}: larger than {size}; {advice}")
    files = _files_read.get()
    if files is not None:
        files.add((status.st_dev, status.st_ino))
    return data


def utf8_text(data: bytes, where: str) -> str:
    """Bytes as UTF-8 text, a byte order mark left out; raises SpecError where they are none."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{where}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from None


def gunzipped(data: bytes, where: str, limit: int, advice: str) -> bytes:
    """What gzip packed, at most ``limit`` bytes; itself where it is not packed.

    Raises
    ------
    SpecError
        If it is broken, or unpacks to more.
    """
    if data[:2] != b"\x1f\x8b":
        return data
    parts, size = [], 0
    try:
        while data:
            stream = zlib.decompressobj(wbits=31)
            parts.append(stream.decompress(data, limit + 1 - size))
            size += len(parts[-1])
            if size > limit:
                raise SpecError(f"{where}: unpacks to more than {limit >> 20} MiB; {advice}")
            if not stream.eof:
                raise SpecError(f"{where}: is cut off; copy the file again")
            data = stream.unused_data.lstrip(b"\0")
    except zlib.error:
        raise SpecError(f"{where}: is no whole file of gzip; copy it again") from None
    return b"".join(parts)


def parse_json(text: str | bytes, where: str, advice: str) -> Any:
    """Value of a JSON text, all of whose numbers a float can hold.

    Raises
    ------
    SpecError
        If it is no JSON, is nested too deeply, or holds a number that is none or too large.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_int=_finite_int, parse_float=_finite_float)
    except (ValueError, OverflowError, RecursionError) as error:
        raise SpecError(f"{where}: is no JSON that can be read ({_kind_of(error)}); {advice}") from None


def number_of_json(value: Any) -> float:
    """A number of a JSON file; raises ValueError for true and false, which Python takes for 1 and 0.

    >>> number_of_json(2), number_of_json("1.5")
    (2.0, 1.5)
    """
    if isinstance(value, bool):
        raise ValueError(f"{value} is no number")
    return float(value)


def json_fault_text(error: json.JSONDecodeError) -> str:
    """Where a text is no JSON, and what is wrong there.

    >>> try:
    ...     json.loads('{"a": ')
    ... except json.JSONDecodeError as error:
    ...     json_fault_text(error)
    'line 1, column 7: something is missing there, or the text ends too early'
    """
    character = error.doc[error.pos : error.pos + 1]
    missing = "something is missing there, or the text ends too early"
    what = f"{character!r} cannot stand there" if character.strip() else missing
    return f"line {error.lineno}, column {error.colno}: {what}"


def _kind_of(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return json_fault_text(error)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number or character that is none" if not isinstance(error, OverflowError) else "a number without bounds"


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise OverflowError
    return number


def _finite_int(text: str) -> int:
    number = int(text)
    float(number)
    return number
