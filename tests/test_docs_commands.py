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


def test_quotes_are_compared_line_by_line() -> None:
    out = "a  1\nb  2\nLooked at 9 strategies, costed 3, in full the 2 that fit; 8.70 s.\n"
    assert (
        SCRIPT.missing_line("a  1\n...\nLooked at 9 strategies, costed 3, in full the 2 that fit; 1.20 s.\n", out)
        is None
    )
    assert SCRIPT.missing_line("a  1\nb  3\n", out) == "b  3"


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
