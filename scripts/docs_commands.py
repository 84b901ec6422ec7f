"""Run every ``mofa`` command of README.md and docs/, and hold what the pages quote of their output to that of today.

``python scripts/docs_commands.py`` runs them all, a few minutes of one core; ``scripts/check docs`` does so.
``python scripts/docs_commands.py docs/moe.md`` runs one page's, ``--write`` puts today's output in its place,
``--list`` prints the commands. Commands of a page run in its order, in one empty folder with the files that they read.

A quoted output is a fence after ``<!-- output of: COMMAND -->``: its lines stand in the output in this order and
beside each other; ``...`` in a line of its own stands for lines left out. Times that the clock measured may differ.
Commands that need a GPU, or that name files of the reader's, are parsed and not run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTE = re.compile(r"^<!-- output of: (mofa .*?) -->\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARSED = ("mofa calibrate run", "mofa calibrate host", "mofa calibrate fit", "mofa calibrate nccl", "mofa measure")
"""What needs a GPU, or files that only a run on one makes."""
PARSED_FILES = (
    "h100-roce.yaml",
    "pairs.yaml",
    "l40s-four.yaml",
    "my-host.yaml",
    "hardware_profiles/nodes/my-node.yaml",
    "measurements/my-node",
    "RUNS.yaml",
    "my-cluster",
)
"""Files that the reader has and this folder has not."""
CLOCK = re.compile(r"(?<=that fit; )\S+ \S+$|(?<=  )median .* 99th percentile .*")
"""What the clock of the machine says: the search's time and the solver's."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "max_position_embeddings": 8192, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip


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
        return not self.text.startswith(PARSED) and not any(name in self.text for name in PARSED_FILES)


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
        found[quoted[1]] = None
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


def quotes(page: Path) -> dict[str, str]:
    """What a page quotes of the output of commands."""
    return {match[1]: match[2] for match in QUOTE.finditer(page.read_text(encoding="utf-8"))}


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


@contextlib.contextmanager
def folder_of_readers_files() -> Iterator[Path]:
    """An empty folder with the files that the pages' commands read, as the working directory."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="mofa-docs-") as name:
        folder = Path(name)
        for model in ("my-hf-model", "my-model"):
            (folder / model).mkdir()
            (folder / model / "config.json").write_text(json.dumps(CONFIG))
        failures = [
            f"n{i % 7},2025-0{1 + i % 6}-{1 + i:02d}T03:00:00,{('software', 'network')[i % 2]}" for i in range(20)
        ]
        (folder / "failures.csv").write_text(
            "\n".join(["node,time,kind", *sorted(failures, key=lambda f: f[4:])]) + "\n"
        )
        counts = [f"{i},0,{e},{100 + 7 * e + i}" for i in range(3) for e in range(32)]
        (folder / "counts.csv").write_text("\n".join(["iteration,layer,expert,tokens", *counts]) + "\n")
        replicas = [f"{e},{4 * k + e // 8}" for k in range(2) for e in range(32)]
        (folder / "replicas.csv").write_text("\n".join(["expert,gpu", *replicas]) + "\n")
        for shared in ("measurements", "reference_runs", "docs", "scripts"):
            (folder / shared).symlink_to(ROOT / shared)
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


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
    """
    have, at_line, gap = [CLOCK.sub("", line.rstrip()) for line in out.splitlines()], 0, True
    for line in (quoted_line.rstrip() for quoted_line in quoted.splitlines()):
        if line == "...":
            gap = True
            continue
        wanted = CLOCK.sub("", line)
        if gap:
            while at_line < len(have) and have[at_line] != wanted:
                at_line += 1
        if at_line >= len(have) or have[at_line] != wanted:
            return line
        at_line, gap = at_line + 1, False
    return None


def rewritten(quoted: str, out: str) -> str:
    """A quote with today's lines: each line from the one that begins alike up to the next gap."""
    lines = [line.rstrip() for line in out.splitlines()]
    parts = [part.strip("\n").splitlines() for part in re.split(r"^\.\.\.$", quoted, flags=re.MULTILINE)]
    fresh = []
    for part in parts:
        begins = part[0].split("  ")[0][:24]
        start = next((i for i, line in enumerate(lines) if line.startswith(begins)), 0)
        fresh.append("\n".join(lines[start : start + len(part)]))
    return "\n...\n".join(fresh) + "\n"


class Asked(NamedTuple):
    """What is to be done with a page's commands."""

    lists: bool
    writes: bool


def check_page(page: Path, asked: Asked) -> tuple[list[str], int]:
    """Run a page's commands in order; what to say of each, and how many are wrong."""
    os.environ.pop("COLUMNS", None)
    text, quoted = page.read_text(encoding="utf-8"), quotes(page)
    said, wrong = [], 0
    with folder_of_readers_files():
        for command in commands(page):
            check_options(command)
            if asked.lists or not command.is_run:
                said.append(f"{'run   ' if command.is_run else 'parsed'} {command.page}: {command.text}")
                continue
            done, quote = run(command), quoted.get(command.text)
            line = None if quote is None else missing_line(quote, done.out + done.error)
            if asked.writes and quote is not None and line is not None:
                text = text.replace(quote, rewritten(quote, done.out + done.error))
                line = None
            said.append(f"{done.cpu_s:6.1f} s  {command.page}: {command.text}")
            if done.status not in (0, 3) or line is not None:
                wrong += 1
                said[-1] = f"WRONG {said[-1]}\n      {done.error.strip() or f'not in its output: {line!r}'}"
    if asked.writes:
        page.write_text(text, encoding="utf-8")
    return said, wrong


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
