"""cli of mofa."""

import os
import signal
import sys
import threading


def _is_the_command() -> bool:
    """Whether this process is the command ``mofa``, and no program that uses the package."""
    program = sys.argv[0] if sys.argv else ""
    names = program.replace(os.sep, "/").split("/")
    return program == "-m" or names[-1] == "mofa" or names[-2:] == ["mofa", "__main__.py"]


def _end_quietly(signum: int, frame: object) -> None:
    os._exit(128 + signum)


if (
    _is_the_command()
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):  # Ctrl-C while modules are imported, when there is nothing to clean up; main answers it from then on
    signal.signal(signal.SIGINT, _end_quietly)
