"""What a user asked of a search space, as what is said of its plans afterwards has to keep to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mofa.search.space import FEWER_GPUS, RECOMPUTE_KINDS_BY_WORD, values_of_fixed_field
from mofa.specs.strategy import RecomputeSpec


@dataclass(frozen=True)
class SpaceConstraints:
    """``--fix``, ``--max`` and ``--without`` of a search, as they bear on changes of a strategy.

    Attributes
    ----------
    fix
        Values by field, as :func:`mofa.find_plans` takes them.
    maximum
        Upper bounds of degrees. [-]
    without
        Words that leave something out.

    Examples
    --------
    >>> asked = SpaceConstraints({"tp": (2, 4)}, {"pp": 4}, ("cp", "full"))
    >>> asked.allows({"tp": 4, "dp": 2}), asked.allows({"tp": 8, "dp": 1})
    (True, False)
    >>> asked.allows({"pp": 8}), asked.allows({"cp": 2}), asked.allows({"recompute": "full"})
    (False, False, False)
    >>> asked.constraints_text
    'fixed tp, bounded pp and left out cp, full recomputation'
    """

    fix: Mapping[str, object] = field(default_factory=dict)
    maximum: Mapping[str, int] = field(default_factory=dict)
    without: Sequence[str] = ()

    def allows(self, changes: Mapping[str, object]) -> bool:
        """Whether fields may have these values."""
        return all(self._allow(name, value) for name, value in changes.items())

    @property
    def constraints_text(self) -> str:
        """What was asked, as a clause with *You* before it; empty where nothing was."""
        named = (
            ("fixed", list(self.fix)), ("bounded", list(self.maximum)),
            ("left out", self._left_out()),
        )  # fmt: skip
        clauses = [f"{verb} {', '.join(names)}" for verb, names in named if names]
        return " and ".join([", ".join(clauses[:-1]), clauses[-1]] if clauses[1:] else clauses)

    def _left_out(self) -> list[str]:
        """What words of ``--without`` left out, kinds of recomputation named as such."""
        kinds = {"recompute": "recomputation", "full": "full recomputation", "selective": "selective recomputation"}
        return [kinds.get(word, word) for word in self.without if word != FEWER_GPUS]

    def _allow(self, name: str, value: object) -> bool:
        text = str(value).lower()
        if name in self.fix and text not in {str(given).lower() for given in values_of_fixed_field(self.fix[name])}:
            return False
        if name in self.maximum and isinstance(value, int) and value > self.maximum[name]:
            return False
        if name == "recompute":
            kind = RecomputeSpec.parse(str(value)).kind
            return not any(kind in RECOMPUTE_KINDS_BY_WORD.get(word, ()) for word in self.without)
        if name == "schedule":
            return value not in self.without
        return name not in self.without or text in ("1", "false", "none")
