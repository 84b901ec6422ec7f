"""Files that mofa writes: beside their places and renamed into them, so that none is ever half there."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import signal
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

from mofa.errors import SpecError
from mofa.specs.limited_reads import error_reason, expect_results_in, was_read
from mofa.specs.shown_text import escape_file_bytes

_numbers = itertools.count()
_set: ContextVar[dict[Path, bytes] | None] = ContextVar("set_of_files", default=None)
"""Files that wait to be written together; None where each is written at once."""
MASKED = {number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None}
"""Signals that end a process; not every system has all."""

_OF_PLANS = ("plans.csv", "time.csv", "memory.csv", "stages.csv")
NAMES_BY_COMMAND: Mapping[str, frozenset[str]] = {
    command: frozenset(names)
    for command, names in {
        "balance": ("balance.json", "layers.csv", "placement.csv"),
        "check": ("check.json", "points.csv"),
        "chunks": ("chunks.json", "chunks.csv"),
        "compare": ("compare.json", "compare.csv"),
        "estimate": ("estimate.json", "stage_times.csv", *_OF_PLANS),
        "factors": ("factors.json", "factors.csv"),
        "goodput": ("goodput.json", "goodput.csv"),
        "plan": ("plan.json", "rejected.csv", "feasible.csv", *_OF_PLANS),
        "report": ("plan.json", "rejected.csv", "feasible.csv", *_OF_PLANS),
        "validate": ("validate.json", "runs.csv"),
    }.items()
}
"""Tables and results that commands write into the folder of ``--out``."""
NAMES_IN_FOLDERS = frozenset().union(*NAMES_BY_COMMAND.values())


def check_writable(path: Path, *, directory: bool = False) -> None:
    """Refuse a place that cannot be written before long work is done for it.

    Raises
    ------
    SpecError
        If it cannot hold the file, or the directory; or where ``-`` was meant as standard output.
    """
    if str(path) == "-":
        raise SpecError("-: a name is needed, and this one is of no file; name one, or /dev/stdout for standard output")
    try:
        if directory:
            _check_directory(path)
        else:
            _check_file(path)
    except SpecError:
        raise
    except (OSError, ValueError) as error:  # a name that is too long, a folder without permission, a loop of links
        raise SpecError(f"{_shown(path)}: cannot be written ({error_reason(error)}); name another place") from None


def _check_directory(path: Path) -> None:
    parent = path
    while not _exists(parent):
        if parent.is_symlink():
            raise SpecError(f"{path}: {parent} is a link to nothing; name another directory, or make {_target(parent)}")
        parent = parent.parent
    if not parent.is_dir():
        if parent == path:
            raise SpecError(f"{path}: is a file, not a directory; name another directory")
        raise SpecError(f"{path}: {parent} is a file, not a directory; name another directory")
    long = next((part for part in path.parts if len(os.fsencode(part)) > 255), None)
    if long is not None:
        raise SpecError(f"{_shown(path)}: a name of it has more than 255 bytes; name another directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SpecError(f"{path}: {parent} cannot be written; name another place")


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise SpecError(f"{path}: is a directory, not a file; name a file in it")
    if not _exists(path.parent) or not path.parent.is_dir():
        raise SpecError(f"{path}: the directory {path.parent} does not exist; make it first")
    if _exists(path) and not path.is_file():  # a device or a pipe, written as it is
        if not os.access(path, os.W_OK):
            raise SpecError(f"{path}: cannot be written; name another place")
        return
    parent = _target(path).parent
    if not parent.is_dir():
        raise SpecError(f"{path}: the directory {parent} does not exist; make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SpecError(f"{path}: {parent} cannot be written; name another place")


def _exists(path: Path) -> bool:
    """Whether a path exists; raises OSError where the system refuses to say, of a loop of links too."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_missing(path: Path) -> bool:
    try:
        return not _exists(path)
    except (OSError, ValueError):  # refused below, by what it is
        return False


def _target(path: Path) -> Path:
    """The file behind links."""
    return Path(os.path.realpath(path))


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 120 else f"{text[:117]}..."


def check_result_places(
    files: Mapping[str, Path | None], directories: Mapping[str, Path | None], inputs: Iterable[object] = (),
    names: Iterable[str] = (),
) -> None:  # fmt: skip
    """Refuse places of results that cannot be written, are one, or are what is read.

    Parameters
    ----------
    files, directories
        By option.
    inputs
        What the other options name: whatever of it is a file is read.
    names
        What comes into the directories.

    Notes
    -----
    What is read later, such as the GPU's file beside a node's, is refused as it is read.

    Raises
    ------
    SpecError
        With the option.
    """
    places: dict[tuple[int, int] | Path, str] = {}
    read = {identity: name for name in _names(inputs) if (identity := _identity(Path(name))) is not None}
    made = {_target(path) for path in directories.values() if path is not None and _is_missing(path)}
    for option, path in files.items():
        if path is None:
            continue
        if not (made and _target(path).parent in made):  # else it is made as the results are written
            check_writable(path)
        if Path(path).exists() and not Path(path).is_file():
            continue  # standard output takes several
        place = _identity(path) or _target(path)
        if place in read:
            raise SpecError(f"{option} {path}: is the file {read[place]} that is read; name another")
        if place in places:
            raise SpecError(f"{option} {path}: {places[place]} names the same file; name two")
        places[place] = option
    for option, path in directories.items():
        if path is None:
            continue
        check_writable(path, directory=True)
        folder = _target(path)
        for other, file in files.items():
            if file is not None and _target(file) == folder:
                raise SpecError(f"{other} {file}: {option} names a directory there; name another file")
            if file is not None and _target(file).parent == folder and Path(file).name in NAMES_IN_FOLDERS:
                raise SpecError(f"{other} {file}: {option} writes a file of that name there; name another")
    expected = {
        identity: f"{option} {path}: is a file that is read; name another place"
        for option, path in files.items() if path is not None and (identity := _identity(path)) is not None
    } | {
        identity: f"{option} {folder}: writes {folder / name}, a file that is read; name another folder"
        for option, folder in directories.items() if folder is not None
        for name in names if (identity := _identity(folder / name)) is not None
    }  # fmt: skip
    for identity in expected.keys() & read.keys():
        raise SpecError(expected[identity])
    expect_results_in(expected)


def _names(inputs: Iterable[object]) -> Iterator[str]:
    """Texts that may name a file, those behind the ``=`` of a setting among them."""
    for item in inputs:
        if isinstance(item, (list, tuple)):
            yield from _names(item)
        elif isinstance(item, (str, Path)) and str(item):
            yield str(item)
            _, equals, value = str(item).partition("=")
            if equals and value:
                yield value


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a plain file; None of anything else."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino) if path.is_file() else None


def make_directory(path: Path) -> None:
    """Make a directory with its parents; raises SpecError where the system refuses."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise SpecError(f"{_shown(path)}: cannot be made ({error_reason(error)}); name another directory") from error


@contextlib.contextmanager
def all_files_or_none() -> Iterator[None]:
    """What is written while it lasts appears at its end: every file of it, or none."""
    if _set.get() is not None:  # a set within a set is part of it
        yield
        return
    files: dict[Path, bytes] = {}
    token = _set.set(files)
    try:
        yield
    finally:
        _set.reset(token)
    write_all_or_none(files)


def write_file_atomically(path: Path, content: bytes, *, replaces_input: bool = False) -> None:
    """Write a whole file or none: under a temporary name, then renamed.

    A place that is no ordinary file, such as a pipe, is written as it is.

    Parameters
    ----------
    path, content
        The place, and what comes there.
    replaces_input
        Whether the place may be a file that this command has read.

    Raises
    ------
    SpecError
        If the system refuses, or the place is a file that was read.
    """
    if not replaces_input and was_read(path):
        raise SpecError(f"{path}: is a file that was read; name another place for the result")
    waiting = _set.get()
    if waiting is not None:
        target = _target(path)
        if any(_target(other) == target for other in waiting):
            raise SpecError(f"{path}: two results of this command are that file; name two places")
        waiting[path] = content
        return
    write_all_or_none({path: content})


def write_all_or_none(files: Mapping[Path, bytes]) -> None:
    """Write files so that all of them appear, or none.

    All are written under temporary names first; signals that would end the process wait while they are renamed.
    Control characters and marks of direction in a text, such as a name of a user, are written as escapes.

    Raises
    ------
    SpecError
        If the system refuses one, with those that are there already, if any.
    """
    staged: list[tuple[Path, Path, Path]] = []
    streams: list[tuple[Path, bytes]] = []
    place = next(iter(files), Path())
    try:
        for place, content in files.items():
            if _exists(place) and not place.is_file():
                streams.append((place, content))
                continue
            target = _target(place)
            _remove_files_of_killed_processes(target.parent)
            temporary = target.with_name(f".mofa-{os.getpid()}-{_process_space()}-{next(_numbers)}.tmp")
            staged.append((place, temporary, target))
            with temporary.open("wb") as file:
                file.write(escape_file_bytes(content))
                file.flush()
                os.fsync(file.fileno())
        _rename(staged)
        for place, content in streams:
            place.write_bytes(escape_file_bytes(content))
    except SpecError:
        raise
    except (OSError, ValueError) as error:
        raise SpecError(f"{_shown(place)}: cannot be written ({error_reason(error)}); name another place") from error
    finally:
        for _, temporary, _ in staged:
            with contextlib.suppress(OSError):
                temporary.unlink()


@lru_cache(maxsize=1)
def _process_space() -> str:
    """Names the machine and, in a container, its own numbers of processes: elsewhere a number is another process."""
    try:
        numbers = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        numbers = 0
    return f"{zlib.crc32(f'{platform.node()} {numbers}'.encode()):08x}"


@lru_cache(maxsize=64)
def _remove_files_of_killed_processes(folder: Path) -> None:
    """Remove temporary files that processes of this machine, which do not run any more, left in a folder."""
    if os.name != "posix":  # elsewhere a signal of number 0 ends a process
        return
    pattern = re.compile(rf"\.mofa-([0-9]{{1,9}})-{_process_space()}-[0-9]+\.tmp")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False) and not _is_running(int(match[1])):
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _rename(staged: list[tuple[Path, Path, Path]]) -> None:
    renamed: list[str] = []
    with _signals_wait():
        for place, temporary, target in staged:
            try:
                temporary.replace(target)
            except OSError as error:
                others = f"; {', '.join(renamed)} are there" if renamed else ""
                raise SpecError(
                    f"{_shown(place)}: cannot be written ({error_reason(error)}); name another place{others}"
                ) from error
            renamed.append(_shown(place))


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals that end the process are delivered at its end."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, MASKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
