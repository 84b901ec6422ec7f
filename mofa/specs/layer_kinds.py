"""Layers of several kinds: which a model has, in what order, and what each is made of.

Models of such layers have exact parameters and states. What a step of them does is not modelled yet, and
:attr:`LayersSpec.unmodelled_text` says what of them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mofa.specs.base import Spec
from mofa.specs.mixers import MixerSpec
from mofa.specs.ranges import ExpertsOrNone, NumHeads, Width

Name = Annotated[str, Field(min_length=1, max_length=60)]


class DenseFfnSpec(Spec):
    """A dense feed-forward of the model's activation."""

    has_experts: ClassVar[bool] = False

    kind: Literal["mlp"] = "mlp"
    ffn_hidden: Width | None = None
    """Its width; the model's ``mlp.ffn_hidden`` where absent. [elements]"""

    @property
    def title(self) -> str:
        """What reports call this feed-forward layer: ``mlp``, with its width where that is its own."""
        return "mlp" if self.ffn_hidden is None else f"mlp of {self.ffn_hidden:,}"


class ExpertsFfnSpec(Spec):
    """The model's experts."""

    has_experts: ClassVar[bool] = True

    kind: Literal["moe"] = "moe"
    hashed: bool = False
    """Whether a table of tokens chooses the experts, without a correction bias (DeepSeek-V4's first layers)."""

    @property
    def title(self) -> str:
        """What reports call this feed-forward layer: ``moe``, or ``hashed moe``."""
        return "hashed moe" if self.hashed else "moe"


FfnSpec = Annotated[DenseFfnSpec | ExpertsFfnSpec, Field(discriminator="kind")]


class LayerKind(Spec):
    """One kind of layer: its mixers, its feed-forwards and its norms."""

    name: Name
    mixers: tuple[MixerSpec, ...] = ()
    """What moves information between tokens, all of them in each layer of this kind."""
    ffns: tuple[FfnSpec, ...] = ()
    """Feed-forwards, all of them in each layer of this kind."""
    norms: Annotated[int, Field(ge=0, le=64, strict=True)] = 2
    """Norms over the hidden width. [-]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.mixers and not self.ffns:
            raise ValueError(f"name ({self.name}): has neither mixers nor ffns; give one")
        return self

    @property
    def num_experts_ffns(self) -> int:
        """How many of its feed-forwards are routed experts. [-]"""
        return sum(ffn.has_experts for ffn in self.ffns)

    @property
    def contents_text(self) -> str:
        """Its mixers and feed-forwards in words."""
        return " + ".join([*(mixer.title for mixer in self.mixers), *(ffn.title for ffn in self.ffns)])

    @property
    def state_elements(self) -> int:
        """Recurrent state of one layer and sequence, without what convolutions remember. [elements]"""
        return sum(mixer.state_elements for mixer in self.mixers)

    @property
    def conv_state_elements(self) -> int:
        """Inputs that convolutions remember of one layer and sequence. [elements]"""
        return sum(mixer.conv_state_elements for mixer in self.mixers)


class LayersSpec(Spec):
    """Layers of several kinds, in order."""

    kinds: Annotated[tuple[LayerKind, ...], Field(min_length=1, max_length=1000)]
    pattern: Annotated[tuple[Name, ...], Field(min_length=1, max_length=10_000)]
    """Names of the kinds of successive layers, repeated until the model's ``num_layers``."""
    prediction: tuple[Name, ...] = ()
    """Names of the kinds of a multi-token-prediction entry's layers; that of the last layer where empty."""
    residual_streams: NumHeads = 1
    """Copies of the residual stream that layers mix (hyper-connections, Zhu et al., arXiv 2409.19606), 1 for one. [-]
    """
    zero_experts: ExpertsOrNone = 0
    """Experts without parameters that the router may choose as well (LongCat-Flash, arXiv 2509.01322). [-]"""
    expert_latent: Width | None = None
    """Width to which tokens are projected for routed experts, and from which back (Nemotron 3 Super); absent where
    experts read the hidden width. [elements]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [kind.name for kind in self.kinds]
        if len(set(names)) != len(names):
            raise ValueError("kinds: two have one name; give each a name of its own")
        for field, used in (("pattern", self.pattern), ("prediction", self.prediction)):
            unknown = next((name for name in used if name not in names), None)
            if unknown is not None:
                raise ValueError(f"{field} names {unknown}, which is no kind; use {', '.join(names)}")
        unused = next((name for name in names if name not in (*self.pattern, *self.prediction)), None)
        if unused is not None:
            raise ValueError(f"kinds: {unused} is in no layer; name it in pattern, or leave it out")
        return self

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of the layer with this index, from 0."""
        return self.kind_named(self.pattern[layer % len(self.pattern)])

    def kind_named(self, name: str) -> LayerKind:
        """The kind of this name."""
        return next(kind for kind in self.kinds if kind.name == name)

    def num_layers_by_kind(self, num_layers: int) -> dict[str, int]:
        """How many layers each kind has, by name. [layers]

        Examples
        --------
        >>> layer = {"mixers": [{"kind": "attention"}], "ffns": [{"kind": "mlp"}]}
        >>> kinds = [{"name": "full", **layer}, {"name": "none", **layer, "mixers": []}]
        >>> LayersSpec.model_validate({"kinds": kinds, "pattern": ["full", "none", "none"]}).num_layers_by_kind(6)
        {'full': 2, 'none': 4}
        """
        each = [self.pattern[i % len(self.pattern)] for i in range(num_layers)]
        return {kind.name: each.count(kind.name) for kind in self.kinds}

    def unmodelled_text(self, num_layers: int) -> str:
        """What of these layers no step is modelled of, with the kinds that have it, as a sentence begins."""
        counts = self.num_layers_by_kind(num_layers)
        mixers = [mixer for kind in self.kinds for mixer in kind.mixers]
        subjects = {mixer.refused_as for mixer in mixers}
        subject = next((s for s in _BY_WEIGHT if s in subjects), "")
        if subject:
            titles = sorted({mixer.title for mixer in mixers if mixer.refused_as == subject} - {subject})
            layers = sum(
                n for name, n in counts.items() if subject in {m.refused_as for m in self.kind_named(name).mixers}
            )
            where = f"{', '.join(titles)} in {layers} of {num_layers} layers".removeprefix(" ")
            return f"{subject} is not modelled yet ({where})"
        if any(len(kind.mixers) > 1 for kind in self.kinds):
            return "several attentions in one layer are not modelled yet"
        bare = sum(n for name, n in counts.items() if not self.kind_named(name).mixers)
        if bare:
            return f"layers without attention are not modelled yet ({bare} of {num_layers})"
        return "layers of several kinds are not modelled yet"


_BY_WEIGHT = (
    "linear attention",
    "sparse attention",
    "multi-matrix factorized attention",
    "attention of several shapes",
    "attention with an output gate",
)
"""Subjects of mixers, that by which a model is refused first."""
