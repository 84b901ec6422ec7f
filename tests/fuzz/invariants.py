"""What must hold of all that is taken."""

from __future__ import annotations


class BrokenInvariant(Exception):
    """Something does not hold."""


def expect(holds: bool, words: str) -> None:
    """Raise unless something holds."""
    if not holds:
        raise BrokenInvariant(words)
