"""YAML is read in one quick pass where it is plain, and means the same then."""

import pytest

from mofa.errors import SpecError
from mofa.specs import files
from mofa.specs.files import MAX_DEPTH, parse_yaml

PLAIN = [
    "a: 1\nb: [1.5, -2, 1e5, 1.5e-05, .inf, 0x1f, 09, 1_000, 0., yes, ~, 2020-01-01]\n",
    "'c d': {e: [], f}\ng: |\n h\n",
    "--- # a document\n- - 1\n  - 'two'\n- {}\n- []\n- 'yes'\n-\n",
    "1: a\n0x1: b\n",
    "null",
]
OTHER = ["", "a: &x 1\nb: *x", "<<: {a: 1}\nb: 2", "a: !!str 1", "a: ! 1", "=: 1"]
WRONG = [
    "a: 1\na: 2", "1: a\n'1': b", "? [a]\n: 1", "a: [1", "a: 1\n---\nb: 2", "a: !foo 1", "a: 2020-99-99", "a: *x",
    "a: 2:30", "a: [1, -1:30.5]", "a: 017", "a: !!int 2:30", "2:30",
    "a: " + "9" * 5000, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "[" + "a," * 100_001 + "]",
]  # fmt: skip


@pytest.mark.parametrize("text", [*PLAIN, *OTHER])
def test_the_quick_way_says_the_same(text: str) -> None:
    assert repr(parse_yaml(text, "x.yaml")) == repr(files._any_yaml(text, "x.yaml"))


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_plain_goes_the_quick_way(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_any_yaml", None)
    parse_yaml(text, "x.yaml")


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_told_the_same(text: str) -> None:
    with pytest.raises(SpecError) as slow:
        files._any_yaml(text, "x.yaml")
    with pytest.raises(SpecError) as quick:
        parse_yaml(text, "x.yaml")
    assert str(quick.value) == str(slow.value)


@pytest.mark.parametrize(("text", "base"), [("2:30", 60), ("190:20:30.15", 60), ("010", 8)])
def test_numbers_of_another_base_are_refused_with_their_line(text: str, base: int) -> None:
    with pytest.raises(
        SpecError, match=f"^x.yaml: line 2: {text} is a number in base {base} to YAML; write it in base"
    ):
        parse_yaml(f"a: 1\nb: {text}", "x.yaml")
    assert parse_yaml(f"b: '{text}'", "x.yaml") == {"b": text}
