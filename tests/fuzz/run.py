"""The loop: draws inputs, reads them, and gathers what is no one-line error of mofa's own."""

from __future__ import annotations

import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mofa.errors import MofaError
from tests.fuzz.readers import Kind, kinds, read_and_check, read_option, written

LONGEST_S = 20.0
"""Of reading one input. [s]"""


@dataclass
class Findings:
    """What was tried and what broke."""

    tried: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    broken: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """First input of each way to break, by kind of input and place in the code."""

    def add(self, kind: str, what: str, data: bytes) -> None:
        """Note an input that broke something."""
        self.broken.setdefault(f"{kind}: {what}", (kind, data))


def fuzz_readers(
    findings: Findings, draw: random.Random, scratch: Path, *, inputs: int, until: float, only: str = ""
) -> None:
    """Read so many mutated inputs, or until the clock of :func:`time.monotonic` says so."""
    chosen = [kind for kind in kinds() if only in kind.name]
    weights = [1 if kind.heavy else 6 for kind in chosen]
    for kind in chosen:
        for name, text in ((kind.file, ""), *kind.beside):
            path = scratch / kind.name.replace(" ", "-") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for _ in range(inputs):
        if time.monotonic() > until:
            return
        if not only and draw.random() < 0.15:
            for text, read in read_option(draw):
                judge(findings, "option", text.encode(errors="surrogatepass"), read)
            continue
        kind = draw.choices(chosen, weights)[0]
        data = written(draw, kind)
        path = scratch / kind.name.replace(" ", "-") / kind.file
        path.write_bytes(data)
        judge(findings, kind.name, data, lambda kind=kind, path=path: read_and_check(kind, path))  # type: ignore[misc]


def judge(findings: Findings, kind: str, data: bytes, read: Callable[[], Any]) -> None:
    """Read one input: it is taken, or refused by one line."""
    findings.tried[kind] += 1
    began = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read()
        findings.accepted[kind] += 1
    except MofaError as error:
        if wrong := wrong_message(str(error)):
            findings.add(kind, f"{wrong}: {str(error)[:200]!r}", data)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        own = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if "/mofa/" in f.filename), last)
        where = f"{Path(own.filename).name}:{own.lineno} {own.name}"
        findings.add(kind, f"{type(error).__name__} at {where}: {str(error)[:150]!r}", data)
    took = time.monotonic() - began
    if took > LONGEST_S:
        findings.add(kind, f"took {took:.0f} s", data)


def wrong_message(text: str) -> str:
    """What is wrong with the message of an error; nothing where it is one line of text with a place.

    Examples
    --------
    >>> wrong_message("x.yaml: tokens (-1) must be at least 1; correct it"), wrong_message("broken")
    ('', 'says no place')
    """
    if len(text) > 2000:
        return "is longer than 2000 characters"
    if ":" not in text:
        return "says no place"
    return "is more than one line" if "\n" in text.strip() else ""


__all__ = ["Findings", "Kind", "fuzz_readers", "judge", "wrong_message"]
