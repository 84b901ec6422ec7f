"""The shell script beside a config that starts it: its GPUs and its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.export.environment import ENVIRONMENT_ROWS
from mofa.export.job_file import read_limited_text
from mofa.export.launch_words import environment_values, num_gpus_of_launch
from mofa.export.shell import UNKNOWN, read_shell_script
from mofa.export.shell_words import ShellError

MAX_SCRIPTS = 20
"""Shell scripts beside a config that are looked at. [-]"""


def read_launch_script_beside(file: Path, name: str) -> tuple[int | None, dict[str, Any]]:
    """GPUs and environment of the one shell script beside a file that has this name in a command; nothing without.

    Raises
    ------
    SpecError
        If the script cannot be read, or a shell would have to compute a variable that matters.
    """
    scripts = sorted(file.parent.glob("*.sh"))[:MAX_SCRIPTS]
    naming = [script for script in scripts if name in read_limited_text(script)]
    if len(naming) != 1:
        return None, {}
    text = read_limited_text(naming[0])
    variables = tuple(argument for row in ENVIRONMENT_ROWS for argument in row.arguments)
    try:
        script = read_shell_script(text)
        commands = [[text for word in command for text in script.expand_word(word)] for command in script.commands]
        words = next((command for command in commands if any(name in word for word in command)), [])
        environment = environment_values(script, variables)
    except ShellError as error:
        raise SpecError(f"{naming[0]}: {error}") from None
    out: dict[str, Any] = {}
    for argument in variables:
        for variable in (argument.name, *argument.aliases):
            value = environment.get(variable[1:])
            if value is not None and UNKNOWN in value:
                raise SpecError(f"{naming[0]}: {variable[1:]}: {value.replace(UNKNOWN, '')}; write its value")
            if value is not None:
                out[argument.name] = value
    return num_gpus_of_launch(words, text), out
