"""torchao's recipes of fp8 linears, and which of torchtitan's linears they are put in place of."""

from __future__ import annotations

from dataclasses import dataclass

from mofa.blocks.work import Format
from mofa.specs.framework import FrameworkSpec
from mofa.specs.model import ModelSpec
from mofa.specs.params import layer_params
from mofa.specs.workload import PrecisionSpec

UNIT = 16
"""What both dimensions of a weight must be a multiple of to be converted (torchtitan 0.2.2,
components/quantization/utils.py, ``module_filter_fn``). [elements]"""
AUTO_FILTER = "auto_filter_small_kn"
"""Among the filters: linears that are too small to gain are left out (torchao 0.17.0, float8_linear_utils.py,
``_auto_filter_for_recipe``)."""
MODULES = {
    "wq": "attention.wq", "wk": "attention.wk", "wv": "attention.wv", "wo": "attention.wo",
    "w1": "feed_forward.w1", "w2": "feed_forward.w2", "w3": "feed_forward.w3",
}  # fmt: skip
"""The linears of a dense block by the names of their ops, and as torchtitan names them inside of a layer."""


@dataclass(frozen=True)
class Float8Recipe:
    """One recipe of torchao's (torchao 0.17.0, float8/config.py, ``Float8LinearConfig.from_recipe_name``)."""

    name: str
    product: Format
    """Kind of the forward's product; the backward's follow (:data:`mofa.blocks.work.BACK_FORMATS`)."""
    by_rows: bool
    """Whether each row, or column, has a scale of its own, which one kernel finds and casts by."""
    weight_gradient_in_bf16: bool
    kernels_per_cast: int
    """The search for the largest, its last part with the scale, and the cast. [-]"""

    @property
    def rescales_weight_gradients(self) -> bool:
        """Whether scales are multiplied behind the product."""
        return self.by_rows and not self.weight_gradient_in_bf16


RECIPES = {
    "tensorwise": Float8Recipe("tensorwise", "fp8_fast", False, False, 3),
    "rowwise": Float8Recipe("rowwise", "fp8_rows", True, False, 1),
    "rowwise-gw-hp": Float8Recipe("rowwise-gw-hp", "fp8_rows_hp", True, True, 1),
}
"""By their names here; torchao writes underscores, and ``gw_hp`` for weights' gradients in high precision."""


@dataclass(frozen=True)
class Float8Linears:
    """The linears of a block that are in fp8, and how."""

    recipe: Float8Recipe
    linears: frozenset[str]
    """Names of their ops, as :data:`MODULES` has them."""


def float8_linears(model: ModelSpec, framework: FrameworkSpec, precision: PrecisionSpec) -> Float8Linears | None:
    """What torchtitan converts of a block's linears; None in bf16 and for other frameworks.

    Examples
    --------
    >>> import mofa
    >>> job, titan = mofa.load_workload("llama3-8b"), mofa.load_framework("torchtitan")
    >>> found = float8_linears(job.model, titan, PrecisionSpec(gemm="fp8-tensorwise"))
    >>> found is not None and sorted(found.linears)
    ['w1', 'w2', 'w3', 'wk', 'wo', 'wq', 'wv']
    >>> filtered = titan.model_copy(update={"fp8_filter": "output+auto_filter_small_kn"})
    >>> found = float8_linears(job.model, filtered, PrecisionSpec(gemm="fp8-tensorwise"))
    >>> found is not None and sorted(found.linears)
    ['w1', 'w2', 'w3', 'wo', 'wq']
    """
    if not precision.fp8_recipe or not framework.traits.has_torchao:
        return None
    recipe = RECIPES[precision.fp8_recipe]
    filters = framework.fp8_filters
    names = frozenset(
        name for name, (n, k) in dense_block_weight_shapes(model).items() if _is_wanted(name, n, k, filters, recipe)
    )  # fmt: skip
    return Float8Linears(recipe, names)


def fp8_gathered_share(model: ModelSpec, framework: FrameworkSpec, linears: Float8Linears | None) -> float:
    """Share of a dense layer's parameters that FSDP gathers in fp8, a byte each; others take two. [-]"""
    if linears is None or not framework.fp8_all_gather:
        return 0.0
    layer = layer_params(model, False)
    converted = sum(n * k for name, (n, k) in dense_block_weight_shapes(model).items() if name in linears.linears)
    return converted / (layer.matrices_tp + layer.shared + layer.replicated)


def dense_block_weight_shapes(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Rows and columns of a dense block's weights, output by input, before any are sharded. [elements]"""
    a, hidden, inner = model.attention, model.hidden, model.mlp.ffn_hidden or 0
    shapes = {
        "wq": (a.num_heads * a.d_qk, hidden), "wk": (a.num_kv_heads * a.d_qk, hidden),
        "wv": (a.num_kv_heads * a.d_v, hidden), "wo": (hidden, a.num_heads * a.d_v),
        "w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden),
    }  # fmt: skip
    return {name: shape for name, shape in shapes.items() if min(shape)}


def _is_wanted(name: str, n: int, k: int, filters: tuple[str, ...], recipe: Float8Recipe) -> bool:
    if n % UNIT or k % UNIT or any(part in MODULES[name] for part in filters if part != AUTO_FILTER):
        return False
    return AUTO_FILTER not in filters or not _is_small(n, k, recipe)


def _is_small(n: int, k: int, recipe: Float8Recipe) -> bool:
    """Whether torchao's own filter leaves a weight out."""
    if recipe.by_rows:
        return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    return k <= 4096 and n <= 1024
