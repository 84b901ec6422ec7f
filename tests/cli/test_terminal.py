"""Tables in a real terminal, at four widths: no number is cut, no line is wider, and what is left out is said."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mofa
from mofa.report.table_layout import LONGEST_WORD, fit_columns
from mofa.report.tables import UNDER, make_console, print_table
from tests.cli.conftest import Cli
from tests.cli.terminal_child import WIDTHS

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Session(NamedTuple):
    """What a terminal showed."""

    screens: dict[tuple[int, str], str]
    """Text by width and case, without colours."""
    tables: list[dict[str, Any]]
    """Every table that was drawn: its case, columns, cells, columns beside each other and those without room."""


def read_terminal(arguments: list[str], environment: dict[str, str]) -> str:
    """What a program prints to a pseudo-terminal that is all its streams."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as child:
        os.close(theirs)
        chunks = []
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # Linux's word for the end of a terminal
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(ours)
    text = ESCAPES.sub("", b"".join(chunks).decode()).replace("\r\n", "\n")
    assert child.returncode == 0, text[-2000:]
    return text


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Every kind of table at every width, in one process."""
    root, record = Path(mofa.__file__).parent.parent, tmp_path_factory.mktemp("terminal") / "tables.json"
    environment = {**os.environ, "PYTHONPATH": str(root), "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    text = read_terminal([sys.executable, "-m", "tests.cli.terminal_child", str(record)], environment)
    parts = re.split(r"^== (\d+) (.*)\n", text, flags=re.MULTILINE)[1:]
    screens = {(int(parts[i]), parts[i + 1]): parts[i + 2] for i in range(0, len(parts), 3)}
    return Session(screens, json.loads(record.read_text()))


def numbers_of(table: dict[str, Any]) -> Iterator[str]:
    """Cells with numbers that the table must show whole, and words with numbers of longer ones."""
    for row in table["rows"]:
        for c, cell in enumerate(row):
            if c in table["left_out"]:
                continue
            pieces = [cell] if table["columns"][c][1] == "right" and len(cell) <= LONGEST_WORD else cell.split()
            yield from (piece for piece in pieces if re.search(r"\d", piece) and len(piece) <= LONGEST_WORD)


def test_no_number_is_cut_at_any_width(session: Session) -> None:
    assert {(table["width"]) for table in session.tables} == set(WIDTHS)
    for table in session.tables:
        screen = session.screens[table["width"], table["name"]]
        words = Counter(screen.split())
        wanted = Counter(word for cell in numbers_of(table) for word in cell.split())
        missing = {word for word, count in wanted.items() if words[word] < count}
        assert not missing, (table["name"], table["width"], missing)


def test_no_line_is_wider_than_the_terminal(session: Session) -> None:
    for (width, name), screen in session.screens.items():
        widest = max(screen.split("\n"), key=len)
        assert len(widest) <= width, (name, width, widest)


def test_no_word_is_broken_at_any_width(session: Session) -> None:
    for table in session.tables:
        screen = session.screens[table["width"], table["name"]]
        words = {word.removesuffix(":") for word in screen.split()}  # a heading that stands before its cell
        shown = [c for c in range(len(table["columns"])) if c not in table["left_out"]]
        cells = [table["columns"][c][0] for c in table["beside"]] + [row[c] for row in table["rows"] for c in shown]
        wanted = {word.removesuffix(":") for cell in cells for word in cell.split() if len(word) <= LONGEST_WORD}
        assert not wanted - words, (table["name"], table["width"], wanted - words)


def test_no_long_word_is_broken_that_a_line_below_would_hold(session: Session) -> None:
    """Addresses and paths in text beside a first column stand under their row."""
    long_words = 0
    for table in session.tables:
        words = set(session.screens[table["width"], table["name"]].split())
        texts = [c for c in table["beside"] if c and table["columns"][c][1] == "left"][-1:]
        wanted = {word for row in table["rows"] for c in texts for word in row[c].split()}
        wanted = {word for word in wanted if LONGEST_WORD < len(word) <= table["width"] - UNDER}
        long_words += len(wanted)
        assert not wanted - words, (table["name"], table["width"], wanted - words)
    assert long_words


def test_what_stands_under_a_row_is_named_where_it_does_not_say_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    columns = (("stage", "right"), ("computes", "right"), ("waits most for", "left"))
    print_table(make_console(), "", columns, [["0", "102.05 s", "tp: 23.39 s"]], under="waits most for",
                names_under=True)  # fmt: skip
    assert "    waits most for tp: 23.39 s" in capsys.readouterr().out.splitlines()


def test_columns_without_room_are_said(session: Session) -> None:
    left = [(table, c) for table in session.tables for c in table["left_out"]]
    for table, c in left:
        screen = " ".join(session.screens[table["width"], table["name"]].split())
        assert re.search(rf"\(no room for: [^)]*{re.escape(table['columns'][c][0])}", screen), table["name"]
    assert any(table["width"] == 80 for table, _ in left)
    assert not [table["name"] for table, _ in left if table["width"] == 160]


def test_a_strategy_goes_under_its_row_and_is_read_back(session: Session) -> None:
    strategy = "tp=2 sp=true pp=4 ep=8 etp=1 dp=8 micro_batch=1 zero=1 recompute=selective"
    narrow = session.screens[80, "plan"]
    assert "\n    " in narrow
    assert strategy in " ".join(narrow.split())
    for column in ("tokens/s/GPU", "MFU", "peak GiB"):
        assert all(word in narrow for word in column.split())
    assert f"1  {strategy}" in session.screens[160, "plan"]


def test_columns_of_a_pipe_are_honoured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, cli("show", "models").stdout.splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, cli("show", "models").stdout.splitlines())) > 160


def test_columns_leave_by_importance() -> None:
    columns = [("#", "right"), ("strategy", "left"), ("step", "right"), ("MFU", "right"), ("limit GiB", "right")]
    rows = [["1", "tp=2 dp=8", "12.50 s", "54.5%", "74.07"]]
    leaves = ("limit GiB", "MFU")
    shown = {width: fit_columns(columns, rows, width, leaves, "strategy") for width in (60, 30, 20, 12, 8)}
    layouts = {width: layout and (layout.shown, layout.is_under) for width, layout in shown.items()}
    assert layouts == {
        60: ((0, 1, 2, 3, 4), False), 30: ((0, 2, 3, 4), True), 20: ((0, 2, 3), True), 12: ((0, 2), True), 8: None,
    }  # fmt: skip
