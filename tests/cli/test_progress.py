"""The progress bar of a search, in a pseudo-terminal: seen there, absent with ``--quiet`` and where there is none."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios
import threading
from collections.abc import Callable

import pytest

from mofa.cli.main import main
from tests.cli.test_terminal import ESCAPES

SEARCH = ("plan", "llama3-8b", "h100-hgx", "--gpus", "8", "--fix", "tp=8", "--fix", "micro_batch=1", "--top", "1")
WIDTH = 80
Search = Callable[..., tuple[str, str]]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    """Run a search with a terminal as standard error; what standard output and the terminal got."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("mofa.cli.progress.PATIENCE_S", 0.0)  # a small search is over before a bar is due
    monkeypatch.setattr("mofa.search.workers.usable_cores", lambda: 1)

    def run(*options: str) -> tuple[str, str]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
        chunks: list[bytes] = []

        def read() -> None:
            with contextlib.suppress(OSError):  # Linux's word for the end of a terminal
                while chunk := os.read(ours, 65536):
                    chunks.append(chunk)

        reader, out = threading.Thread(target=read), io.StringIO()
        reader.start()
        terminal = os.fdopen(theirs, "w", encoding="utf-8")
        with terminal, contextlib.redirect_stdout(out), contextlib.redirect_stderr(terminal):
            status = main((*SEARCH, *options))
        reader.join()
        os.close(ours)
        assert status == 0
        return out.getvalue(), b"".join(chunks).decode()

    return run


def test_a_search_draws_a_bar_on_a_terminal_and_takes_it_away(search: Search) -> None:
    out, drawn = search()
    assert "Best plan\n" in out
    assert "best so far" not in out
    lines = [ESCAPES.sub("", line) for line in drawn.replace("\r", "\n").split("\n")]
    bars = [line for line in lines if "━" in line]
    assert any(line.startswith("llama3-8b on 8 GPUs ") for line in bars)
    assert any(line.startswith("playing the best plans out ") for line in bars)
    assert all(line.rstrip().endswith("left") for line in bars), bars
    assert any(line.startswith("best so far: tp=8 ") for line in lines)
    assert max(map(len, bars)) <= WIDTH
    assert drawn.rstrip().endswith("\x1b[2K")  # the line of the bar is erased


def test_quiet_draws_none(search: Search) -> None:
    out, drawn = search("--quiet")
    assert "Best plan\n" in out
    assert drawn == ""


def test_standard_error_that_is_no_terminal_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mofa.cli.progress.PATIENCE_S", 0.0)
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        assert main((*SEARCH, "--fast")) == 0
    assert "Best plan\n" in out.getvalue()
    assert error.getvalue() == ""
