"""Facts of a GPU's libraries that were fitted on one of them, and what GPUs take that have none of their own."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from mofa.specs.base import CountFact, Fact, PositiveFact, RatioFact, SecondsFact, ShareFact, Spec
from mofa.specs.files import data_dir, load_yaml
from mofa.specs.from_mapping import spec_from_mapping

FILE = "unmeasured.yaml"


BATCHED_OVERHEAD = Fact(value=0.7, provenance="assumed", source="the H200's; see hardware_profiles/gpus/h200-sxm.yaml")
"""Where a profile has none."""


class UnalignedProductRates(Spec):
    """Rate of products whose rows begin at no multiple of 16 bytes, over that of aligned ones of their size. [-]

    ``batched`` are several products in one kernel. Of single ones in bf16 ``even`` widths are multiples of 4 or 8
    bytes; an odd one is over the rate at full clock, as kernels that load less at once do not reach the power limit.
    """

    batched_depth_8_bytes: ShareFact
    """Depths that 8 bytes divide and 16 do not. [-]"""
    batched_depth_4_bytes: ShareFact
    """Depths that 4 or fewer bytes divide. [-]"""
    batched_width_8_bytes: ShareFact
    """Widths, likewise. [-]"""
    batched_width_4_bytes: ShareFact
    batched_overhead: ShareFact = BATCHED_OVERHEAD
    """Of aligned ones too: prologue and epilogue of a tile over those of a single product, as a batch's overlap. [-]"""
    forward_even: ShareFact
    forward_odd: ShareFact
    forward_odd_depth: ShareFact
    """Where the depth alone is odd. [-]"""
    input_gradient_even: ShareFact
    input_gradient_odd: ShareFact
    weight_gradient_even: ShareFact
    weight_gradient_odd: ShareFact

    def single_product_rates(self, product: Literal["fwd", "dgrad", "wgrad"]) -> tuple[float, float]:
        """Of single products of a linear layer's way: with an even width, and with an odd one. [-]

        Examples
        --------
        >>> load_unmeasured_gpu_facts().unaligned_products.single_product_rates("fwd")
        (0.34, 0.121)
        """
        even, odd = {
            "fwd": (self.forward_even, self.forward_odd),
            "dgrad": (self.input_gradient_even, self.input_gradient_odd),
            "wgrad": (self.weight_gradient_even, self.weight_gradient_odd),
        }[product]
        return even.value, odd.value


class Optimizer16BitRates(Spec):
    """Rate of the optimizer's kernels on 16-bit tensors, as a share of that on fp32 ones. [-]"""

    adam_fused: ShareFact
    adam_foreach: ShareFact
    """Adam by separate kernels. [-]"""
    grad_norm: ShareFact
    grad_clip: ShareFact


class KernelSelectionFacts(Spec):
    """How the library of products chooses kernels by the number of rows.

    Two numbers ``r`` apart, as a share, have one kernel with ``exp(-r / c)``. In a product of ``w`` waves ``c`` is
    ``alike_share / w^alike_exponent``. At a tenth of a wave a tile's height is what tells kernels apart, and several
    numbers have the best one.

    Two numbers further apart have one kernel by ``far_share log2(1 + w)``, if their products' waves differ by less than
    ``far_reach``. Below a wave tiles are cut to the number, so that hardly any two are alike. Of several waves few
    large tiles do for all.
    """

    unchanged_share: ShareFact
    """How far, as a share of a number of rows, the choice stays what it is. [-]"""
    alike_share: ShareFact
    alike_exponent: ShareFact
    far_share: ShareFact
    far_reach: CountFact
    wave_outputs: PositiveFact
    """Outputs of one wave of the largest tiles over the multiprocessors, in which products are counted. [outputs]"""


class LayerKernelRatios(Spec):
    """Layers' kernels that were not fitted by themselves, over measured ones that they are like. [-]"""

    te_norm_forward: RatioFact
    """Time of Transformer Engine's general norms over that of its tuned ones at their width. [-]"""
    te_norm_backward: RatioFact
    te_head_norm_forward: RatioFact
    """The same of rows as short as a head. [-]"""
    te_head_norm_backward: RatioFact
    te_norm_amax: RatioFact
    """Time of a general norm that also finds the largest of its output, over one that does not; tuned ones find it for
    nothing. [-]"""
    te_norm_cast: RatioFact
    """Time of a general norm that hands on fp8 by an older scale, over one that hands on bf16. [-]"""
    te_tuned_norm_cast: RatioFact
    """The same of tuned ones. [-]"""
    ragged_block_cast: RatioFact
    """Time of a cast to fp8 blocks of rows that a block does not divide, over that of rows that it does. [-]"""
    any_width_swiglu_forward_passes: RatioFact
    """Passes over the output that SwiGLU takes as long as where it is compiled for any width. [-]"""
    any_width_swiglu_backward_passes: RatioFact
    unsplit_norm_sum: RatioFact
    """What the sum of a norm's weight gradient by a block of threads for every 32 columns adds to a row's backward. A
    row with split sums is 1. [-]"""


class MultiStreamExtraTimes(Spec):
    """What products on several streams take beside those of one (:mod:`mofa.specs.multi_stream`)."""

    floor_s: SecondsFact
    start_s: SecondsFact
    sharpness: PositiveFact
    """Exponent that joins computing and moving. [-]"""
    adding_rate: ShareFact
    """Rate of adding to the main gradients over that of writing. [-]"""


def facts_of_gpu_record(
    spec: UnalignedProductRates | Optimizer16BitRates | KernelSelectionFacts | LayerKernelRatios,
) -> list[Fact]:
    """All facts of one of these records."""
    return [getattr(spec, name) for name in type(spec).model_fields]


class UnmeasuredGpuFacts(Spec):
    """What a GPU takes whose profile doesn't have them: another GPU's facts, marked ``assumed``."""

    unaligned_products: UnalignedProductRates
    optimizer_16_bit: Optimizer16BitRates
    kernel_selection: KernelSelectionFacts
    layer_kernels: LayerKernelRatios
    multi_stream_starts: MultiStreamExtraTimes


@lru_cache(maxsize=1)
def load_unmeasured_gpu_facts() -> UnmeasuredGpuFacts:
    """The bundled facts for GPUs that were not measured.

    Examples
    --------
    >>> load_unmeasured_gpu_facts().unaligned_products.forward_even.provenance
    'assumed'
    """
    return spec_from_mapping(UnmeasuredGpuFacts, load_yaml(data_dir("hardware_profiles") / FILE, FILE), FILE)
