"""The command line: what all commands share, and the one place where errors become a line and an exit status.

A command is a function in a file of its own that parses, calls one function and shows; to add one, add its name to
:data:`mofa.cli.command_groups.PANELS`. Only the command that is asked for is imported, and heavy modules inside its
function, so that ``mofa --help`` is quick.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from mofa.cli import _end_quietly
from mofa.cli.command_groups import GroupedCommands
from mofa.errors import MofaError, NothingFits, SpecError
from mofa.specs.limited_reads import remember_read_files
from mofa.specs.shown_text import escape_invisible

EXIT_INTERNAL, EXIT_SPEC, EXIT_NOTHING_FITS, EXIT_INTERRUPTED = 1, 2, 3, 130
SELDOM = 300_000
"""Objects that are made between two looks for cycles: what is imported and read makes 100,000, and few cycles. [-]"""

app = typer.Typer(
    name="mofa",
    cls=GroupedCommands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"mofa {version('mofa')}")
        except PackageNotFoundError:
            typer.echo("mofa, not installed")
        raise typer.Exit


@app.callback()
def options_without_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plan the training of large language models: time, memory and the best parallel strategy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; those of the process by default.

    Returns
    -------
    int
        The exit status: 0 done, 2 something the user wrote is wrong, 3 nothing fits, 130 interrupted, 1 a bug.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process ends with this command: what it made is seldom looked through for cycles, nor then
        gc.set_threshold(SELDOM)
        atexit.register(gc.freeze)
    if sys.stdout is None:  # closed, as by `mofa plan ... >&-`: what is said is lost, files are written
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks is shown escaped, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _terminate_as_exit(), remember_read_files():
            status = _run(arguments or ["--help"])
            sys.stdout.flush()
            return status
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            return _fail("standard output: no space left on its device; free some or write elsewhere", EXIT_SPEC)
        return EXIT_INTERNAL  # the reader went away, as in `mofa plan ... | head -1`


def _run(arguments: list[str]) -> int:
    try:
        _answer_interrupts()
        _refuse_odd_bytes(arguments)
        _refuse_empty_places(arguments)
        result = typer.main.get_command(app).main(args=arguments, prog_name="mofa", standalone_mode=False)
        if result == EXIT_INTERRUPTED:  # typer made an exit status of the interruption
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except MofaError as error:
        if os.environ.get("MOFA_DEBUG"):
            traceback.print_exc()
        return _fail(str(error), EXIT_NOTHING_FITS if isinstance(error, NothingFits) else EXIT_SPEC)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted; no file is half-written", EXIT_INTERRUPTED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC):
            raise  # standard output takes no more
        if hasattr(error, "format_message"):  # a usage error of click, or of the copy of it that typer brings
            from mofa.cli.usage_errors import usage_error_text

            return _fail(usage_error_text(error), EXIT_SPEC)
        if os.environ.get("MOFA_DEBUG"):
            traceback.print_exc()
        return _fail(
            f"internal error: {type(error).__name__}: {error}; this is a bug of mofa, MOFA_DEBUG=1 shows where",
            EXIT_INTERNAL,
        )


def _answer_interrupts() -> None:
    """From here on Ctrl-C unwinds the stack; while modules were imported it ended the process at once."""
    with contextlib.suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGINT) is _end_quietly:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _refuse_odd_bytes(arguments: Sequence[str]) -> None:
    """Refuse arguments that are no text: results repeat names, and are UTF-8."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise SpecError(f"{argument[:60]!r}: is not UTF-8; rename the file or write the name as UTF-8") from None


_PLACES = ("--out", "--json-file", "--csv", "--markdown", "--readme")


def _refuse_empty_places(arguments: Sequence[str]) -> None:
    """Refuse a place without a name, which would be the folder that one stands in, and a file named as a folder."""
    for option, value in zip(arguments, [*arguments[1:], "."], strict=True):
        name, equals, text = option.partition("=")
        place = text if equals else value
        if name in _PLACES and not place.strip():
            raise SpecError(f"{name}: is empty; name a place, such as . for this folder, or leave it out")
        if name in _PLACES and name != "--out" and place.endswith(("/", os.sep)):
            raise SpecError(f"{name} {place}: names a folder, and one file is written; name a file in it")


def _fail(message: str, status: int) -> int:
    line = escape_invisible(" ".join(message.split()))
    with contextlib.suppress(OSError, ValueError):
        print(f"mofa: {line}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _terminate_as_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, so that temporary files are removed and workers end."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before: dict[int, Any] = {}
    try:
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                before[number] = signal.signal(number, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
