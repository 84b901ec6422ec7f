"""Errors of the command line's library, said as mofa says its own: *where: what; what to do*."""

from __future__ import annotations

import re
from typing import Any

_TYPES = {"int": "a whole number", "float": "a number", "integer": "a whole number"}


def usage_error_text(error: Any) -> str:
    """A usage error in mofa's words.

    Parameters
    ----------
    error
        A usage error of click, or of the copy of it that typer brings.
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "mofa"
    look = f"see '{command} --help'"
    kind, param = type(error).__name__, getattr(error, "param", None)
    message = " ".join(str(getattr(error, "message", "") or error.format_message()).split()).rstrip(".")
    if kind == "NoSuchOption" and context is not None:
        from mofa.specs.files import did_you_mean

        names = [name[2:] for item in context.command.params for name in item.opts if name.startswith("--")]
        if hint := _other_option(error.option_name.lstrip("-"), names):
            return f"{error.option_name}: is no option of {command}; {hint}"
        hint = did_you_mean(error.option_name.lstrip("-"), names, before="--")
        if hint.startswith(("use one", "there is none")):
            hint = _commands_with(error.option_name, context) or look
        return f"{error.option_name}: is no option of {command}; {hint}"
    if kind == "MissingParameter" and param is not None:
        return f"{_name(param)}: is missing; {_help(param) or 'write it'}; {look}"
    if kind == "BadParameter" and param is not None:
        what = message if ";" in message else _what(message)
        return f"{_name(param)}: {what}" if what.endswith("?") or what is message else f"{_name(param)}: {what}; {look}"
    if kind == "BadOptionUsage" and "not take a value" in message:
        return f"{error.option_name}: takes no value; leave it out; {look}"
    if kind == "BadOptionUsage":
        return f"{error.option_name}: its value is missing; write it after the option; {look}"
    if extra := re.search(r"unexpected extra arguments? ?\(?s?\)? ?\((.*)\)", message):
        return f"{extra[1]}: nothing is expected here; leave it out, or quote words that belong together; {look}"
    if missing := re.match(r"No such command '([^']*)'(?:\. Did you mean '([^']*)')?", message):
        hint = f"did you mean {missing[2]}?" if missing[2] else look
        return f"{missing[1]}: is no command; {hint}"
    if message == "Missing command":
        commands = ", ".join(getattr(context.command, "commands", {})) if context is not None else ""
        return f"{command}: what of it is missing; use one of {commands}"
    return f"{message}; {look}"


def _other_option(word: str, options: list[str]) -> str:
    """What a command calls an option that other programs name so, or have one of; empty where it has none.

    >>> _other_option("batch-size", ["global-batch"]), _other_option("tp", ["fix"]), _other_option("tp", ["gpus"])
    ('did you mean --global-batch?', 'write --fix tp=N', '')
    """
    from mofa.specs.overrides import STRATEGY_KEYS
    from mofa.specs.unmodelled import ELSEWHERE, known_synonym, normalised_word

    option = "--global-batch" if normalised_word(word) == "batchsize" else ELSEWHERE.get(normalised_word(word), "")
    if option[2:] in options:
        return f"did you mean {option}?"
    if option.partition(" ")[0][2:] in options:
        return f"write {option}"
    if normalised_word(word) in ("model", "workload", "cluster", "hardware", "node"):
        return "workload and cluster are written without options, as in llama3-8b h100-hgx"
    field = known_synonym(word, tuple(STRATEGY_KEYS))
    if field and "fix" in options:
        return f"write --fix {field}=N"
    return f'write --strategy "{field}=N"' if field and "strategy" in options else ""


def _commands_with(option: str, context: Any) -> str:
    """Which other commands an option belongs to, as words; empty where it does to none."""
    group = context.find_root().command
    having = [
        name
        for name, command in getattr(group, "commands", {}).items()
        if any(option in item.opts for item in command.params)
    ]
    joined = " and ".join(", ".join(some) for some in (having[:-1], having[-1:]) if some)
    return f"it belongs to {joined}" if joined else ""


def _name(param: Any) -> str:
    """The option or the argument."""
    return str(max(param.opts, key=len)) if param.param_type_name == "option" else str(param.name)


def _help(param: Any) -> str:
    text = str(getattr(param, "help", "") or "").rstrip(".")
    return text[:1].lower() + text[1:] if text[:2].istitle() else text


def _what(message: str) -> str:
    """What is wrong with a value."""
    plain = message.replace("Value error, ", "")
    if low := re.search(r"(greater|less) than( or equal to)? (-?[\d.]+)", plain):
        ends = {"greater": ("at least", "above"), "less": ("at most", "below")}[low[1]]
        return f"must be {ends[0] if low[2] else ends[1]} {low[3]}"
    if span := re.match(r"(\S+) is not in the range (\S+)$", plain):
        return _out_of_span(float(span[1]), span[2])
    if choice := re.search(r"is not one of (.*)", plain):
        value = re.match(r"'([^']*)'", plain)
        known = choice[1].replace("'", "")
        if not value:
            return f"use one of {known}"
        from mofa.specs.files import did_you_mean

        hint = did_you_mean(value[1], known.rstrip(".").split(", "))
        return f"{value[1]} is unknown; {hint if hint.startswith('did you mean') else f'use one of {known}'}"
    for kind, words in _TYPES.items():
        if f"valid {kind}" in plain or (kind == "float" and "valid number" in plain):
            return f"must be {words}"
    return plain


def _out_of_span(value: float, span: str) -> str:
    """What a value must be that is outside a span as click and older typers write it.

    >>> [_out_of_span(-1.0, span) for span in ("0<=x<=64", "x>=2", "x>0.5")], _out_of_span(99.0, "0<=x<=64")
    (['must be at least 0', 'must be at least 2', 'must be above 0.5'], 'must be at most 64')
    """
    low = re.match(r"(.+?)(<=?)x", span) or re.match(r"x(?=(>=?)(.+)$)", span)
    first, sign = (low[1], low[2]) if low and low[0] != "x" else (low[2], low[1]) if low else ("-inf", "")
    if value < float(first) or (value == float(first) and "=" not in sign):
        return f"must be {'at least' if '=' in sign else 'above'} {first}"
    high = re.search(r"x(<=?)(.+)$", span)
    return f"must be {'at most' if high and '=' in high[1] else 'below'} {high[2]}" if high else f"must be in {span}"
