"""Run every ``mofa`` command of README.md and docs/, and hold what the pages quote of their output to that of today.

``python scripts/docs_commands.py`` runs them all, a few minutes of one core; ``scripts/check docs`` does so.
``python scripts/docs_commands.py docs/moe.md`` runs one page's, ``--write`` puts today's output in its place,
``--list`` prints the commands. Commands of a page run in its order, in one empty folder with the files that they read.

A quoted output follows ``<!-- output of: COMMAND -->``, behind which ``(exit status 2)`` says that the command refuses.
Several may quote one command, which runs once.

- A fence: its lines stand in the output in this order and beside each other. ``...`` in a line of its own stands for
  lines left out, in a line for what differs from machine to machine, such as seconds of a search.
- A table: its columns are those of the output with the same titles, but the first, whose cells name rows up to a comma.
  Percents may differ by ``PERCENT_POINTS``, as SciPy's versions do.

``--write`` leaves a quote as it is, and is an error, where a line of it has no counterpart today.
Commands that need a GPU, or that name files of the reader's, are parsed and not run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTE = re.compile(
    r"^<!-- output of: (?P<command>mofa [^\n]*?)(?: \(exit status (?P<status>\d)\))? -->\n\n?"
    r"(?:```\w*\n(?P<fence>.*?)^```$|(?P<table>(?:^\|[^\n]*\n)+))",
    re.MULTILINE | re.DOTALL,
)
PARSED = ("mofa calibrate run", "mofa calibrate host", "mofa calibrate fit", "mofa calibrate nccl", "mofa measure",
          "mofa serve")  # fmt: skip
"""What needs a GPU, or files that only a run on one makes, or lasts until it is interrupted."""
PARSED_FILES = (
    "my-host.yaml",
    "hardware_profiles/nodes/my-node.yaml",
    "measurements/my-node",
    "RUNS.yaml",
    "my-cluster",
    "--scheduler",
    "--format chakra",
)
"""Files, machines and packages that the reader has and this folder has not."""
ROW = re.compile(r"\s*(\d+)  ")
"""The beginning of a table's row that has a number."""
NUMBER = r"(?<![\d.,])[\d.,]*\d(?![\d.,]*\d)"
"""A whole number in a line of output, as a pattern."""
PERCENT_POINTS = 0.4
"""By how much a percent of a quoted table may differ. [percent points]"""


class Command(NamedTuple):
    """A command of a page."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """Its arguments, without ``mofa``."""
        return shlex.split(self.text)[1:]

    @property
    def is_run(self) -> bool:
        """Whether it can run anywhere."""
        if self.text.startswith(PARSED) or any(name in self.text for name in PARSED_FILES):
            return False
        from readers_files import clusters_of_readers

        return "--fast" in self.words or not any(name in self.text for name in clusters_of_readers())


class Quote(NamedTuple):
    """What a page quotes of a command's output."""

    command: str
    status: int | None
    """The exit status that the command must have; None where 0 and 3 are as good."""
    text: str
    is_table: bool

    def wrong_line(self, out: str) -> str | None:
        """The first quoted line that the output has not where it should; None where all stand there."""
        return wrong_row(self.text, out) if self.is_table else missing_line(self.text, out)

    def today(self, out: str) -> str:
        """The same excerpt of today's output.

        Raises
        ------
        ValueError
            For a line that has no counterpart in it.
        """
        return table_of_today(self.text, out) if self.is_table else rewritten(self.text, out)


class Done(NamedTuple):
    """What a command did."""

    status: int
    out: str
    error: str
    cpu_s: float


def pages() -> list[Path]:
    """README.md and the pages of docs/ that users read."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[Command]:
    """The ``mofa`` commands in a page's fences, in order, each once; comments and a shell's beginnings are cut off.

    >>> [c.text for c in commands(ROOT / "docs" / "layouts.md")][0].startswith("mofa estimate llama3-8b")
    True
    """
    found: dict[str, None] = {}
    text = page.read_text(encoding="utf-8")
    for quoted in QUOTE.finditer(text):
        found[quoted["command"]] = None
    for fence in FENCE.finditer(QUOTE.sub("", text)):
        if fence[1] not in ("", "bash", "console"):
            continue
        lines = fence[2].replace("\\\n", " ").splitlines()
        for line in lines:
            for part in _parts(line.removeprefix("$ ")) if "mofa " in line else ():
                if re.match(r"mofa [a-z]+( |$)", part) and not part.endswith("..."):
                    found[part] = None
    order = sorted(found, key=lambda command: text.index(command.split("  ")[0]) if command in text else 0)
    return [Command(str(page.relative_to(ROOT)), command) for command in order]


def _parts(line: str) -> list[str]:
    """Commands of a line of a shell, without their comments.

    >>> _parts('pip install . && mofa plan x --fix "layout=Et|tL"  # the best')
    ['pip install .', 'mofa plan x --fix "layout=Et|tL"']
    """
    try:
        lexer = shlex.shlex(line, posix=False, punctuation_chars="&;|")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:  # a line of text with an apostrophe
        return []
    parts: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("&;|"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [" ".join(part) for part in parts if part]


def quotes(page: Path) -> list[Quote]:
    """What a page quotes of the output of commands."""
    return [
        Quote(
            match["command"],
            int(match["status"]) if match["status"] else None,
            match["fence"] if match["table"] is None else match["table"],
            match["table"] is not None,
        )
        for match in QUOTE.finditer(page.read_text(encoding="utf-8"))
    ]


def check_options(command: Command) -> None:
    """Parse a command without running it; an option that is not there is an error of the command line."""
    group = _command_line()
    context = group.make_context("mofa", list(command.words), resilient_parsing=False)
    words = list(getattr(context, "_protected_args", [])) + list(context.args)
    while hasattr(group, "commands"):
        name, group, words = group.resolve_command(context, words)
        context = group.make_context(name, words, parent=context)
        words = list(getattr(context, "_protected_args", [])) + list(context.args)


@lru_cache
def _command_line() -> Any:
    """mofa's commands with their options."""
    import typer

    from mofa.cli.main import app

    return typer.main.get_command(app)


def run(command: Command) -> Done:
    """Run a command in this process, as on a pipe."""
    from mofa.cli.main import main

    out, error = io.StringIO(), io.StringIO()
    begun = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = main(command.words)
    return Done(status, out.getvalue(), error.getvalue(), time.process_time() - begun)


def missing_line(quoted: str, out: str) -> str | None:
    """The first quoted line that the output has not where it should; None where all stand there.

    >>> missing_line("a\\n...\\nc\\n", "a\\nb\\nc\\n"), missing_line("a\\nc\\n", "a\\nb\\nc\\n")
    (None, 'c')
    >>> missing_line("in ... s\\n", "in 2.5 s\\n"), missing_line("in ... s\\n", "in 2.5 ms\\n")
    (None, 'in ... s')
    """
    lines, begin = [line.rstrip() for line in out.splitlines()], 0
    for part in _parts_of_quote(quoted):
        start, wrong = _place(part, lines, begin, _is_line)
        if start is None:
            return wrong
        begin = start + len(part)
    return None


def rewritten(quoted: str, out: str) -> str:
    """A quote with today's lines, found by their labels.

    Raises
    ------
    ValueError
        For a line that has no counterpart today.

    >>> rewritten("row  1 s\\n...\\nsum  2 s\\n", "row  3 s\\nb  4 s\\nsum  7 s\\n")
    'row  3 s\\n...\\nsum  7 s\\n'
    >>> rewritten("row  1 s\\ngone  2 s\\n", "row  3 s\\nb  4 s\\n")
    Traceback (most recent call last):
    ...
    ValueError: nothing in today's output stands for 'gone  2 s'

    >>> rewritten("top\\n1  tp=2 ... 3.5 s ... 72\\n", "top\\n1  tp=4 pp=2   12.25 s  9 GiB  68.1\\n")
    'top\\n1  tp=4 ... 12.25 s ... 68.1\\n'

    A strategy is found without its table's titles, in the row of its number:

    >>> rewritten("1  tp=2 dp=8 ...  3.5 s ...\\n", "2  tp=1 dp=4  2 s\\n1  tp=2 dp=8 zero=1  4.5 s  72\\n")
    '1  tp=2 dp=8 ...  4.5 s ...\\n'
    """
    lines, begin, fresh = [line.rstrip() for line in out.splitlines()], 0, []
    for part in _parts_of_quote(quoted):
        start, wrong = _place(part, lines, begin, _is_line)
        if start is None:
            start, wrong = _place(part, lines, begin, _stands_for)
            if start is None:
                raise ValueError(f"nothing in today's output stands for {wrong!r}")
            if ROW.match(part[0]) and not ("=" in part[0] and "..." in part[0]):  # only dots keep a strategy's words
                raise ValueError(f"a row's number says nothing of its table; quote the titles above {part[0]!r}")
        begin = start + len(part)
        today = lines[start:begin]
        fresh.append("\n".join(_anew(old, new) for old, new in zip(part, today, strict=True)))
    return "\n...\n".join(fresh) + "\n"


def _parts_of_quote(quoted: str) -> list[list[str]]:
    """The lines of a quote that stand beside each other."""
    parts: list[list[str]] = [[]]
    for line in quoted.splitlines():
        if line.strip() == "...":
            parts.append([])
        else:
            parts[-1].append(line.rstrip())
    return [part for part in parts if part]


def _place(
    part: list[str], lines: list[str], begin: int, fits: Callable[[str, str], bool]
) -> tuple[int | None, str | None]:
    """Where lines of a quote stand beside each other in an output; else the one that ends the longest try."""
    longest = 0
    for start in range(begin, len(lines)):
        pairs = zip(part, lines[start:], strict=False)
        num = sum(1 for _ in takewhile(lambda pair: fits(*pair), pairs))
        if num == len(part):
            return start, None
        longest = max(longest, num)
    return None, part[longest]


def _is_line(quoted: str, line: str) -> bool:
    """Whether a quoted line is a line of the output, but for what ``...`` stands for."""
    return re.fullmatch(".*".join(re.escape(piece) for piece in quoted.split("...")), line) is not None


def _stands_for(quoted: str, line: str) -> bool:
    """Whether a line is today's of a quoted one: the same row of a table, or the same sentence with other numbers."""
    if (row := ROW.match(quoted)) and not ((today := ROW.match(line)) and today[1] == row[1]):
        return False
    if "..." in quoted:
        return _around_dots(quoted, line) is not None
    old, new = re.split(r"\s{2,}", quoted.strip()), re.split(r"\s{2,}", line.strip())
    if len(old) == len(new) == 1:
        return re.sub(r"[\d.,]+", "0", quoted) == re.sub(r"[\d.,]+", "0", line)
    return len(old) == len(new) and old[0] == new[0]


def _anew(quoted: str, line: str) -> str:
    """A quoted line where it is today's still; else that, with ``...`` where the quoted one has them."""
    around = None if _is_line(quoted, line) else _around_dots(quoted, line)
    return quoted if _is_line(quoted, line) else "...".join(around.groups()) if around else line


def _around_dots(quoted: str, line: str) -> re.Match[str] | None:
    """A line as the parts around the ``...`` of a quoted one, with other numbers and columns of other widths."""
    of_parts = []
    for part in quoted.split("..."):
        pieces = re.split(r"([\d.,]*\d|\s{2,})", part)  # every second one may differ
        differ = (" {2,}" if piece.isspace() else NUMBER for piece in pieces[1::2])
        pieces[0::2], pieces[1::2] = map(re.escape, pieces[0::2]), differ
        of_parts.append(f"({''.join(pieces)})")
    return re.fullmatch(".*?".join(of_parts), line)


def _cells(row: str) -> list[str]:
    """The cells of a row of a page's table."""
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def _rows_of_output(out: str, titles: list[str]) -> dict[str, dict[str, str]]:
    """The rows of the output's tables that have these columns, by their first cells and titles."""
    rows: dict[str, dict[str, str]] = {}
    header: list[str] = []
    for line in out.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if set(titles) <= set(cells):
            header = cells
        elif len(cells) < 2:
            header = []
        elif header:
            rows.setdefault(cells[0], dict(zip(header, cells, strict=False)))
    return rows


def _is_cell(quoted: str, cell: str) -> bool:
    """Whether a quoted cell is a cell of the output, but for ``PERCENT_POINTS``.

    >>> _is_cell("1.7%", "1.6%"), _is_cell("1.7%", "2.2%"), _is_cell("140", "141"), _is_cell("4%, 10%", "4%, 10%")
    (True, False, False, True)
    """
    old, new = (re.fullmatch(r"([+-]?[\d.]+)%", text) for text in (quoted, cell))
    if old is None or new is None:
        return quoted == cell
    return abs(float(old[1]) - float(new[1])) <= PERCENT_POINTS + 1e-9


def wrong_row(table: str, out: str) -> str | None:
    """The first row of a quoted table that the output has not with these numbers; None where all stand there.

    >>> table = "| here | points | bias |\\n|---|---|---|\\n| gemm, third | 2 | -0.1% |\\n"
    >>> wrong_row(table, "family  points  more  bias\\ngemm    2       9     -0.2%\\n")
    >>> wrong_row(table, "family  points  more  bias\\ngemm    3       9     -0.2%\\n")
    '| gemm, third | 2 | -0.1% |'
    """
    header, _, *rows = table.splitlines()
    titles = _cells(header)[1:]
    today = _rows_of_output(out, titles)
    for row in rows:
        name, *cells = _cells(row)
        there = today.get(name.split(",")[0], {})
        if not all(_is_cell(cell, there.get(title, "")) for title, cell in zip(titles, cells, strict=True)):
            return row
    return None


def table_of_today(table: str, out: str) -> str:
    """A quoted table with today's numbers.

    Raises
    ------
    ValueError
        For a row, or a cell of it, that is not in the output.
    """
    header, line, *rows = table.splitlines()
    titles = _cells(header)[1:]
    today = _rows_of_output(out, titles)
    fresh = [header, line]
    for row in rows:
        name = _cells(row)[0]
        there = today.get(name.split(",")[0], {})
        if not set(titles) <= set(there):
            raise ValueError(f"nothing in today's output stands for {row!r}")
        fresh.append(f"| {' | '.join([name, *(there[title] for title in titles)])} |")
    return "\n".join(fresh) + "\n"


class Asked(NamedTuple):
    """What is to be done with a page's commands."""

    lists: bool
    writes: bool


def check_page(page: Path, asked: Asked) -> tuple[list[str], int]:
    """Run a page's commands in order; what to say of each, and how many are wrong."""
    from readers_files import folder_of_readers_files

    os.environ.pop("COLUMNS", None)
    text, quoted = page.read_text(encoding="utf-8"), quotes(page)
    said, wrong = [], 0
    with folder_of_readers_files():
        for command in commands(page):
            check_options(command)
            if asked.lists or not command.is_run:
                said.append(f"{'run   ' if command.is_run else 'parsed'} {command.page}: {command.text}")
                continue
            done, its_quotes = run(command), [quote for quote in quoted if quote.command == command.text]
            faults = _faults_of_status(done, its_quotes)
            for quote in its_quotes:
                text, fault = _compare(quote, done.out + done.error, text, asked.writes)
                faults += [fault] if fault else []
            said.append(f"{done.cpu_s:6.1f} s  {command.page}: {command.text}")
            if faults:
                wrong += 1
                said[-1] = "\n      ".join([f"WRONG {said[-1]}", *faults])
    if asked.writes:
        page.write_text(text, encoding="utf-8")
    return said, wrong


def _faults_of_status(done: Done, its_quotes: list[Quote]) -> list[str]:
    """What is wrong with how a command ended."""
    wanted = {quote.status for quote in its_quotes} - {None} or {0, 3}
    if done.status in wanted:
        return []
    return [f"exit status {done.status}: {done.error.strip()}"]


def _compare(quote: Quote, out: str, text: str, writes: bool) -> tuple[str, str | None]:
    """A page's text, with today's output where that is asked for, and what is wrong with a quote."""
    line = quote.wrong_line(out)
    if line is None:
        return text, None
    if not writes:
        return text, f"not in its output: {line!r}"
    try:
        today = quote.today(out)
    except ValueError as error:
        return text, f"left as it is: {error}"

    def of_this_command(match: re.Match[str]) -> str:
        is_it = match["command"] == quote.command and quote.text in (match["fence"], match["table"])
        return match[0].replace(quote.text, today) if is_it else match[0]

    return QUOTE.sub(of_this_command, text), None


def main() -> int:
    """Run commands of pages, a page in each process; the number of those that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="Pages; all by default.")
    parser.add_argument("--write", action="store_true", help="Put today's output in place of what is quoted.")
    parser.add_argument("--list", action="store_true", help="Print the commands and whether each is run.")
    given = parser.parse_args()
    asked = Asked(given.list, given.write)
    chosen = [page.resolve() for page in given.pages] or pages()
    all_wrong = 0
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), 4), mp_context=get_context("spawn")) as pool:
        for said, wrong in pool.map(partial(check_page, asked=asked), chosen):
            print("\n".join(said), flush=True)
            all_wrong += wrong
    return all_wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))
