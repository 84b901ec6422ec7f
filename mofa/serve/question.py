"""What a page asks: GPUs, memory and degrees, as its sliders stand, checked field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mofa.errors import SpecError
from mofa.specs.base import Spec
from mofa.specs.from_mapping import spec_from_mapping
from mofa.specs.limited_reads import parse_json
from mofa.specs.ranges import MAX_GPUS, Degree

MOST_MEMORY_GB = 10_000.0
"""Of a GPU, with room for those to come. [GB]"""


class SliderDegrees(Spec):
    """Values of degrees, of those that are given."""

    tp: Degree | None = None
    pp: Degree | None = None
    vpp: Degree | None = None
    cp: Degree | None = None
    ep: Degree | None = None
    etp: Degree | None = None
    micro_batch: Degree | None = None

    def given_degrees(self) -> dict[str, Any]:
        """What has a value.

        Examples
        --------
        >>> SliderDegrees(tp=2, pp=4).given_degrees()
        {'tp': 2, 'pp': 4}
        """
        return {name: value for name, value in self if value is not None}


class Anchor(SliderDegrees):
    """Values at which an answer at once holds what is searched."""

    cp_kind: Literal["ring", "allgather", "a2a"] | None = None


DEGREES = tuple(SliderDegrees.model_fields)
"""Degrees that have a slider."""


class Question(Spec):
    """What the sliders say."""

    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS, strict=True)]
    """[-]"""
    memory_gb: Annotated[float, Field(gt=0.0, le=MOST_MEMORY_GB, strict=True)] | None = None
    """Memory of a GPU for a plan and its margin; the GPU's own where absent. [GB]"""
    degrees: SliderDegrees = SliderDegrees()
    """Degrees that the user chose; the others are searched."""
    anchor: Anchor = Anchor()
    """Of degrees that are searched, values at which an answer at once holds them."""
    workload: Annotated[str, Field(max_length=20)] = "0"
    """Number of the job: 0 is the one that the server began with, others come of configs."""

    def without_anchor(self) -> Question:
        """What is searched behind the answer at once."""
        return self.model_copy(update={"anchor": Anchor()})


class HandedConfig(Spec):
    """A Hugging Face ``config.json`` that a page hands over, and how to train it."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    text: Annotated[str, Field(max_length=900_000)]
    seq_len: Annotated[int, Field(ge=1, le=2**31, strict=True)]
    """[tokens]"""
    global_batch: Annotated[int, Field(ge=1, le=2**31, strict=True)]
    """[sequences]"""


def read_question(body: bytes) -> Question:
    """What a request asks.

    Raises
    ------
    SpecError
        One line, of the first thing that is wrong.

    Examples
    --------
    >>> read_question(b'{"gpus": 64, "degrees": {"tp": 2}}').degrees.given_degrees()
    {'tp': 2}
    >>> read_question(b'{"gpus": 64, "degrees": {"tp": 0}}')
    Traceback (most recent call last):
    mofa.errors.SpecError: request: degrees.tp (0) must be greater than or equal to 1; correct it
    """
    question = spec_from_mapping(Question, _mapping(body), "request")
    both = [name for name in question.anchor.given_degrees() if name in question.degrees.given_degrees()]
    if both:
        raise SpecError(f"request: {both[0]} is chosen and held; say it once")
    return question


def read_handed_config(body: bytes) -> HandedConfig:
    """A config that a request hands over.

    Raises
    ------
    SpecError
        One line, of the first thing that is wrong.
    """
    return spec_from_mapping(HandedConfig, _mapping(body), "request")


def _mapping(body: bytes) -> dict[str, Any]:
    raw = parse_json(body, "request", "send a JSON object")
    if not isinstance(raw, dict):
        raise SpecError(f"request: holds a {type(raw).__name__}; send a JSON object")
    return raw
