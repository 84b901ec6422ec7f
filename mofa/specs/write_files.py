"""Files that mofa writes: beside their places and renamed into them, so that none is ever half there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mofa.errors import SpecError


def check_writable(path: Path, *, directory: bool = False) -> None:
    """Refuse a place that cannot be written before long work is done for it.

    Raises
    ------
    SpecError
        If it cannot hold the file, or the directory; or where ``-`` was meant as standard output.
    """
    if str(path) == "-":
        raise SpecError("-: a name is needed, and this one is of no file; name one, or /dev/stdout for standard output")
    if directory:
        if path.exists() and not path.is_dir():
            raise SpecError(f"{path}: is a file, not a directory; name another directory")
        parent = path
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise SpecError(f"{path}: {parent} is a file, not a directory; name another directory")
    else:
        parent = path.parent
        if path.is_dir():
            raise SpecError(f"{path}: is a directory, not a file; name a file in it")
        if not parent.is_dir():
            raise SpecError(f"{path}: the directory {parent} does not exist; make it first")
    if not os.access(parent, os.W_OK):
        raise SpecError(f"{path}: {parent} cannot be written; name another place")


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file or none: under a temporary name, then renamed.

    A place that is no ordinary file, such as a pipe, is written as it is.

    Raises
    ------
    SpecError
        If the system refuses.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        target = path.resolve()
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as error:
        raise SpecError(f"{path}: cannot be written ({error.strerror}); name another place") from error
