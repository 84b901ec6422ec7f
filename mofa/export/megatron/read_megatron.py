"""Jobs on Megatron-LM read: a shell script with arguments, or a log with Megatron's dump of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mofa.errors import SpecError
from mofa.export.arguments import Argument, GivenArguments
from mofa.export.job_file import MAX_LOG_BYTES, JobOfFile, job_from_arguments, read_limited_text
from mofa.export.launch_words import environment_values, num_gpus_of_launch
from mofa.export.megatron.megatron_table import DUMPED_AS, MEGATRON
from mofa.export.shell import MAYBE, UNKNOWN, ShellScript, read_shell_script
from mofa.export.shell_words import ShellError
from mofa.units import is_whole_number

_DUMPED = re.compile(r"^(?:[^\s:>]{0,40}[:>])?[ \t]*([A-Za-z_]\w*) \.+ (.*)$", re.MULTILINE)
_PADDED = re.compile(r"padded vocab \(size: (\d+)\)")
FEWEST_DUMPED = 50
"""Lines of a dump from which on a file is a log. [-]"""
_ENVIRONMENT = tuple(argument for argument in MEGATRON.arguments.values() if argument.name.startswith("$"))
_WORLD_SIZE = "world_size"


def read_megatron_job(file: Path, num_gpus: int | None) -> JobOfFile:
    """The job of a script or of a log.

    Raises
    ------
    SpecError
        If it has no arguments, or some that matter and are not modelled.
    """
    text = read_limited_text(file, MAX_LOG_BYTES)
    dumped = {name: said.strip() for name, said in _DUMPED.findall(text)}
    if len(dumped) >= FEWEST_DUMPED:
        values, unread, gpus = _of_dump(dumped, text, str(file))
    else:
        values, unread, gpus = _of_script(read_limited_text(file), str(file))
    if not values:
        raise SpecError(f"{file}: has no arguments of pretrain_gpt.py; name a script that calls it, or its log")
    given = GivenArguments(values, MEGATRON, str(file), num_gpus if num_gpus is not None else gpus)
    return job_from_arguments(MEGATRON, given, file, tuple(unread), f"arguments of Megatron-LM in {file.name}")


# --- a log


def _of_dump(dumped: Mapping[str, str], text: str, where: str) -> tuple[dict[str, Any], list[str], int | None]:
    """Typed values of a dump, nothing unread (a dump has all arguments), and its GPUs."""
    names = {argument.dump_name: argument for argument in MEGATRON.arguments.values()}
    values: dict[str, Any] = {}
    for name, said in dumped.items():
        argument = names.get(name)
        if argument is not None and argument.kind in ("flag", "off"):
            values[argument.name] = said == "True"
        elif argument is not None and said != "None":
            values[argument.name] = _typed(argument, _listed(said) if argument.kind == "texts" else [said], where)
        elif argument is None and (known := DUMPED_AS.get(name, name.replace("_", "-"))) in MEGATRON.unmodelled:
            values[known] = _python_value(said)
    if (padded := _PADDED.search(text)) is not None:
        values |= {"vocab-size": int(padded[1]), "tokenizer-type": "as the log says"}
    gpus = dumped.get(_WORLD_SIZE, "")
    unread = [f"{argument.name} (no part of a dump)" for argument in _ENVIRONMENT]
    return values, unread, int(gpus) if is_whole_number(gpus) else None


def _listed(text: str) -> list[str]:
    """The entries of a list as a dump has it, or the one value.

    >>> _listed("['mlp', 'moe_act']"), _listed("aux_loss")
    (['mlp', 'moe_act'], ['aux_loss'])
    """
    return [entry.strip().strip("'\"") for entry in text.strip("[]").split(",")]


def _python_value(text: str) -> object:
    """A value as a dump has it."""
    known: dict[str, object] = {"None": None, "True": True, "False": False}
    if text in known:
        return known[text]
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


# --- a script


def _of_script(text: str, where: str) -> tuple[dict[str, Any], list[str], int | None]:
    """Typed values of a script's arguments, names of those that are not read, and its GPUs."""
    try:
        script = read_shell_script(text)
        launch, words = split_launch_command(script)
        environment = environment_values(script, _ENVIRONMENT)
    except ShellError as error:
        raise SpecError(f"{where}: {error}") from None
    values: dict[str, Any] = {}
    unread: list[str] = []
    for option, parts in _options(words):
        name = option.removeprefix(f"{MAYBE}--")
        argument = _argument(name)
        if option != name and (argument is not None or name in MEGATRON.unmodelled):
            raise SpecError(f"{where}: --{name} is given in one branch of an if alone; write it, or leave it out")
        if argument is not None:
            values[argument.name] = _typed(argument, parts, where)
        elif name in MEGATRON.unmodelled:
            values[name] = _known(parts, name, where)
        else:
            unread.append(f"--{name}" if not name.startswith(UNKNOWN) else name.strip(UNKNOWN))
    for argument in _ENVIRONMENT:
        for name in (argument.name, *argument.aliases):
            if (value := environment.get(name[1:])) is not None:
                values[argument.name] = _typed(argument, [value], where)
    return values, unread, num_gpus_of_launch(launch, text)


def split_launch_command(script: ShellScript) -> tuple[list[str], list[str]]:
    """The words of the launcher, and the arguments: of the command that runs a Python file, else of all arrays."""
    for command in script.commands:
        words = [text for word in command for text in script.expand_word(word)]
        places = [i for i, word in enumerate(words) if word.endswith(".py")]
        if places and any(_argument(word.lstrip("-")) for word in words[places[0] :]):
            return words[: places[0]], words[places[0] + 1 :]
    words = [text for entries in script.arrays.values() for word in entries for text in script.expand_word(word)]
    words += [text for command in script.commands for word in command for text in script.expand_word(word)]
    return words, words


def _argument(name: str) -> Argument | None:
    """The argument of a name or of another name for it."""
    known = MEGATRON.arguments
    if name in known:
        return known[name]
    return next((argument for argument in known.values() if name in argument.aliases), None)


def _options(words: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Arguments with their values, the last of each; words that belong to none as names of their own."""
    out: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            out.pop(name, None)
            out[name] = [value] if equals else []
        elif word.startswith(f"{MAYBE}--"):
            name = word.partition("=")[0]
            out[name] = []
        elif name and not (word.startswith(UNKNOWN) and _is_complete(name, out[name])):
            out[name].append(word)
        elif word.startswith(UNKNOWN):
            out[word] = []
    return list(out.items())


def _is_complete(name: str, values: list[str]) -> bool:
    """Whether an argument takes no more values."""
    argument = _argument(name)
    if argument is None:
        return False
    return argument.kind in ("flag", "off") or (argument.kind not in ("texts", "ints") and len(values) > 0)


def _known(parts: list[str], name: str, where: str) -> object:
    """The value of an argument that matters, as far as it says one; a switch is true."""
    if any(UNKNOWN in part for part in parts):
        raise SpecError(f"{where}: --{name}: {' '.join(parts).replace(UNKNOWN, '')}; write its value")
    return True if not parts else _python_value(parts[0])


def _typed(argument: Argument, parts: list[str], where: str) -> Any:
    """A value of the argument's type.

    Raises
    ------
    SpecError
        If it is none, or a shell would have to compute it.
    """
    if argument.kind in ("flag", "off"):
        return argument.kind == "flag"
    shown = f"--{argument.name}" if not argument.name.startswith("$") else argument.name[1:]
    if any(UNKNOWN in part for part in parts):
        raise SpecError(f"{where}: {shown}: {' '.join(parts).replace(UNKNOWN, '')}; write its value")
    if argument.kind == "texts":
        return parts
    if len(parts) != 1:
        raise SpecError(f"{where}: {shown} has {len(parts)} values; give it one")
    try:
        text = parts[0].removeprefix("AttnBackend.")
        return int(text) if argument.kind == "int" else float(text) if argument.kind == "float" else text
    except ValueError:
        kind = "whole number" if argument.kind == "int" else "number"
        raise SpecError(f"{where}: {shown} ({parts[0][:40]}) is no {kind}; write one") from None
