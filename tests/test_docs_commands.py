"""README.md and docs/: their commands have the options that they name, and what is not modelled is listed.

``python scripts/docs_commands.py``, which ``scripts/check docs`` runs, runs the commands and compares what is quoted.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mofa.specs.unmodelled import NOT_MODELLED

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 100


def load_script() -> ModuleType:
    """``scripts/docs_commands.py`` as a module."""
    spec = importlib.util.spec_from_file_location("docs_commands", ROOT / "scripts" / "docs_commands.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_commands"] = module
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
COMMANDS = [command for page in SCRIPT.pages() for command in SCRIPT.commands(page)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text[:50]}")
def test_the_options_of_every_command_exist(command: object) -> None:
    SCRIPT.check_options(command)


def test_an_option_that_is_not_there_is_an_error() -> None:
    with pytest.raises(Exception, match="No such option"):
        SCRIPT.check_options(SCRIPT.Command("x.md", "mofa plan llama3-8b h100-hgx --gpus 8 --colour red"))


def test_commands_are_taken_from_their_shell_lines() -> None:
    assert {command.page for command in COMMANDS} >= {"README.md", "docs/faults.md", "docs/moe.md", "docs/layouts.md"}
    assert any(command.text == "mofa plan deepseek-v3 h800-hgx --gpus 2048" for command in COMMANDS)
    assert any("layout=Et*14|t*18L" in command.text for command in COMMANDS)


OUT = """a  1
b  2
Looked at 9 strategies, costed 3, in full the 2 that fit; 8.70 s.

 #  strategy  step
 1  pp=2      3 s
 2  pp=4      4 s
"""


def test_quotes_are_compared_line_by_line() -> None:
    quoted = "a  1\n...\nLooked at 9 strategies, costed 3, in full the 2 that fit; ...\n"
    assert SCRIPT.missing_line(quoted, OUT) is None
    assert SCRIPT.missing_line("a  1\nb  3\n", OUT) == "b  3"
    assert SCRIPT.missing_line("a  1\n 1  pp=2      3 s\n", OUT) == " 1  pp=2      3 s"


def test_a_quote_is_written_anew_by_its_lines_labels() -> None:
    assert SCRIPT.rewritten("a  9\n...\n #  strategy  step\n 1  pp=8      9 s\n", OUT) == (
        "a  1\n...\n #  strategy  step\n 1  pp=2      3 s\n"
    )
    assert SCRIPT.rewritten("Looked at 7 strategies, costed 2, in full the 1 that fit; 1.0 s.\n", OUT) == (
        "Looked at 9 strategies, costed 3, in full the 2 that fit; 8.70 s.\n"
    )


@pytest.mark.parametrize(
    ("quoted", "named"),
    [
        ("a  1\ngone  2\n", "gone  2"),
        ("gone  2\n", "gone  2"),
        ("b  2\n...\na  1\n", "a  1"),
        ("Looked at 7 plans; ...\n", "Looked at 7 plans; ..."),
        (" 1  pp=8      9 s\n", " 1  pp=8      9 s"),
        (" #  strategy  step\n 3  pp=8      9 s\n", " 3  pp=8      9 s"),
    ],
)
def test_a_line_that_vanished_is_named_and_nothing_is_put_in_its_place(quoted: str, named: str) -> None:
    assert SCRIPT.missing_line(quoted, OUT) is not None
    with pytest.raises(ValueError, match=re.escape(repr(named))):
        SCRIPT.rewritten(quoted, OUT)


def test_a_line_with_dots_keeps_them_around_what_is_new() -> None:
    out = " #  strategy      step  GiB  days\n 1  tp=4 pp=2   12.25 s  9.0  68.1\n"
    quoted = " #  strategy ... days\n 1  tp=2 ... 3.5 s ... 72\n"
    assert SCRIPT.rewritten(quoted, out) == " #  strategy ... days\n 1  tp=4 ... 12.25 s ... 68.1\n"
    assert SCRIPT.missing_line(SCRIPT.rewritten(quoted, out), out) is None
    with pytest.raises(ValueError, match="nothing in today's output"):
        SCRIPT.rewritten(quoted.replace("tp=2", "cp=2"), out)


def test_a_row_alone_is_written_anew_where_it_names_a_strategy() -> None:
    out = "#  step\n1   9 s\n 2  tp=2 dp=8  3 s  7\n 1  tp=2 dp=8 zero=1  2.5 s  8\n"
    assert SCRIPT.rewritten(" 1  tp=2 dp=4 ...  3.5 s ...\n", out) == " 1  tp=2 dp=8 ...  2.5 s ...\n"
    with pytest.raises(ValueError, match="quote the titles above"):
        SCRIPT.rewritten(" 1   8 s\n", " 1  9 s\n")


def test_alike_quotes_of_two_commands_are_written_each_by_its_own() -> None:
    text = "<!-- output of: mofa a -->\n```\nx  1\n```\n\n<!-- output of: mofa b -->\n```\nx  1\n```\n"
    quote = SCRIPT.Quote("mofa b", None, "x  1\n", False)
    assert SCRIPT._compare(quote, "x  2\n", text, True) == (text[:-9] + "x  2\n```\n", None)


def test_files_of_the_page_of_clusters_are_there_and_whole_plans_on_them_are_parsed() -> None:
    from readers_files import clusters_of_readers

    assert {"h100-roce.yaml", "pairs.yaml", "a100-pcie-40gb.yaml", "l40s-four.yaml"} <= set(clusters_of_readers())
    whole = SCRIPT.Command("docs/clusters.md", "mofa plan llama3-8b pairs.yaml --gpus 16")
    assert not whole.is_run and whole._replace(text=f"{whole.text} --fast").is_run


def test_a_page_keeps_a_quote_whose_line_vanished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another quote of the same run is written all the same; the page counts as wrong."""
    page, mark = tmp_path / "page.md", "<!-- output of: mofa show models -->"
    text = f"{mark}\n```\ngone  2\n```\n\n{mark}\n```\na  7\n```\n\n{mark}\n| x | step |\n|---|---|\n| 3 | 9 s |\n"
    page.write_text(text)
    monkeypatch.setattr(SCRIPT, "ROOT", tmp_path)
    runs = []
    monkeypatch.setattr(SCRIPT, "run", lambda command: runs.append(command) or SCRIPT.Done(0, OUT, "", 0.0))
    said, wrong = SCRIPT.check_page(page, SCRIPT.Asked(lists=False, writes=True))
    assert wrong == len(runs) == 1
    assert "left as it is" in said[0] and "'gone  2'" in said[0] and "'| 3 | 9 s |'" in said[0]
    assert page.read_text() == text.replace("a  7", "a  1")


def test_tables_are_compared_by_their_titles() -> None:
    table = "| model | step |\n|---|---|\n| 1, first | 3 s |\n"
    out = "#  strategy  step\n1  pp=2      3 s\n"
    assert SCRIPT.wrong_row(table, out) is None
    assert SCRIPT.wrong_row(table.replace("3 s", "4 s"), out) == "| 1, first | 4 s |"
    assert SCRIPT.table_of_today(table.replace("3 s", "4 s"), out) == table


def test_a_quote_ends_with_the_status_that_it_says() -> None:
    done = SCRIPT.Done(2, "", "mofa: no", 0.0)
    refusal = SCRIPT.Quote("mofa plan x", 2, "mofa: no\n", is_table=False)
    assert SCRIPT._faults_of_status(done, [refusal]) == []
    assert SCRIPT._faults_of_status(done, []) == ["exit status 2: mofa: no"]
    assert SCRIPT._faults_of_status(done._replace(status=0), [refusal]) != []


def test_the_readme_lists_what_is_not_modelled() -> None:
    listed = README.split("<!-- not modelled -->\n")[1].split("\n<!-- /not modelled -->")[0].splitlines()
    nearest = ["" if method.nearest == "none" else f"; the nearest is {method.nearest}" for method in NOT_MODELLED]
    assert listed == [f"- {method.name}{text}" for method, text in zip(NOT_MODELLED, nearest, strict=True)]


def test_paragraphs_of_the_readme_are_short() -> None:
    text = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\|.*$|^<!--.*$", "", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", text)
    assert [words[:60] for words in paragraphs if len(words.split()) >= MOST_WORDS] == []


def test_the_readme_begins_with_a_plan_and_ends_with_research() -> None:
    order = [README.index(f"## {title}") for title in ("A first plan", "Your model", "Your cluster", "Your script")]
    assert order == sorted(order)
    assert README.index("mofa balance") > max(order)
    assert README.count("![") == 1
