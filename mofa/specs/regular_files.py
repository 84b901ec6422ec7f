"""What is no file to read: named pipes, sockets and devices, of which opening one may wait for ever."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mofa.errors import SpecError


def refuse_special_file(path: str | Path, where: str) -> None:
    """Refuse what is no regular file, before it is opened.

    A pipe that a shell made for ``<(command)`` has no name on the disk and a writer at its other end: it is read.

    Parameters
    ----------
    path
        What a user names as a file; one that is not there, and a folder, are left to who opens it.
    where
        What error messages call it.

    Raises
    ------
    SpecError
        If it is a named pipe, a socket or a device.
    """
    try:
        mode = Path(path).stat().st_mode
        has_name = Path(os.path.realpath(path)).exists()
    except (OSError, ValueError):
        return
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (stat.S_ISFIFO(mode) and not has_name):
        return
    kind = "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise SpecError(f"{where}: is {kind}, no file; write what it gives into a file and name that")
