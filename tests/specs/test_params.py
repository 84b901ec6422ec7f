"""Parameter counts out of structure equal the released checkpoints, and lists of tensor shapes written by hand."""

from __future__ import annotations

import math

import pytest

from mofa.specs.load import load_workload
from mofa.specs.params import head_params, layer_params, num_active_params, num_mtp_params, num_params

Shape = tuple[int, ...]


def _count(*shapes: Shape) -> int:
    return sum(math.prod(shape) for shape in shapes)


RELEASED = {
    # Published tensor counts of the released checkpoints (huggingface.co/api/models/NAME, safetensors.total), without
    # multi-token prediction, as public code that reads those pages has recorded them. Mixtral-8x22B: Instruct-v0.1,
    # whose vocabulary is 32768. DeepSeek-V3: its checkpoints' headers without the fp8 scales. Lists of shapes by hand
    # are below.
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
}


@pytest.mark.parametrize(("name", "released"), RELEASED.items())
def test_count_equals_the_released_checkpoint(name: str, released: int) -> None:
    assert num_params(load_workload(name).model) == released


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # gpt-oss model card, arXiv 2508.10925, Table 1: 116.83B total; its 5.13B active leave out the embedding.
        ("gpt-oss-120b", 116.83e9, 5.13e9 + 201_088 * 2880),
        # DeepSeek-V3, arXiv 2412.19437, abstract: 671B, 37B activated. The 37B leave out the embedding.
        ("deepseek-v3", 671.03e9, 36.62e9 + 129_280 * 7168),
        # Kimi K2, arXiv 2507.20534, Table 2: 1.04T (with rounding up), 32.6B activated.
        ("kimi-k2", 1.0264e12, 32.86e9),
        # GPT-3, arXiv 2005.14165, Table D.1: 174,600M.
        ("gpt3-175b", 174.6e9, 174.6e9),
    ],
)
def test_count_is_within_a_thousandth_of_the_published_one(name: str, total: float, active: float) -> None:
    model = load_workload(name).model
    assert num_params(model) == pytest.approx(total, rel=1e-3)
    assert num_active_params(model) == pytest.approx(active, rel=2e-3)


def test_llama3_8b_by_its_tensors() -> None:
    """The 291 tensors of Meta-Llama-3-8B by their shapes (model.safetensors.index.json)."""
    layer = _count(
        (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096),  # q k v o
        (14336, 4096), (14336, 4096), (4096, 14336),  # gate up down
        (4096,), (4096,),
    )  # fmt: skip
    model = load_workload("llama3-8b").model
    assert layer_params(model, moe=False).total_params == layer == 218_112_000
    assert num_params(model) == 32 * layer + 2 * _count((128_256, 4096)) + 4096


def test_gpt3_by_its_tensors() -> None:
    h = 12288
    layer = _count((3 * h, h), (3 * h,), (h, h), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,), (h,), (h,), (h,), (h,))
    model = load_workload("gpt3-175b").model
    assert head_params(model) == 0
    assert num_params(model) == 96 * layer + _count((50257, h), (2048, h), (h,), (h,)) == 174_604_259_328


def test_deepseek_v3_by_its_tensors() -> None:
    """Shapes of DeepSeek-V3's modelling code; 61 layers, the first 3 dense, and the layer for token prediction."""
    h = 7168
    attention = _count(
        (1536, h), (1536,), (128 * 192, 1536),  # q_a, its norm, q_b
        (512 + 64, h), (512,), (128 * (128 + 128), 512), (h, 128 * 128),  # kv_a, its norm, kv_b, o
        (h,), (h,),
    )  # fmt: skip
    expert = _count((2048, h), (2048, h), (h, 2048))
    dense = attention + _count((18432, h), (18432, h), (h, 18432))
    sparse = attention + 257 * expert + _count((256, h), (256,))
    model = load_workload("deepseek-v3").model
    assert layer_params(model, moe=False).total_params == dense
    assert layer_params(model, moe=True).total_params == sparse
    assert num_params(model) == 3 * dense + 58 * sparse + 2 * 129_280 * h + h == 671_026_419_200
    assert num_mtp_params(model) == sparse + _count((h, 2 * h), (h,), (h,), (h,))
    assert num_active_params(model) == num_params(model) - 58 * 248 * expert


def test_deepseek_v3_with_token_prediction_is_the_released_685b() -> None:
    """The checkpoint stores copies of embedding and head for that layer: 684.53e9 with one fp8 scale per 128 x 128."""
    model = load_workload("deepseek-v3").model
    stored = num_params(model) + num_mtp_params(model) + 2 * 129_280 * 7168
    assert stored == pytest.approx(684.53e9, rel=1e-4)


def test_gpt_oss_by_its_tensors() -> None:
    """Shapes of GptOssForCausalLM: experts' gate and up are one tensor with a bias, a sink per head, a router bias."""
    h = 2880
    attention = _count(
        (4096, h), (4096,), (512, h), (512,), (512, h), (512,), (h, 4096), (h,), (64,), (h,), (h,)
    )  # fmt: skip
    experts = _count((128, h, 2 * 2880), (128, 2 * 2880), (128, 2880, h), (128, h))
    router = _count((128, h), (128,))
    model = load_workload("gpt-oss-120b").model
    assert num_params(model) == 36 * (attention + experts + router) + 2 * 201_088 * h + h == 116_829_156_672


def test_mixtral_active_is_two_of_eight_experts() -> None:
    """Mixtral of Experts, arXiv 2401.04088: 12.9B active parameters."""
    model = load_workload("mixtral-8x7b").model
    assert num_active_params(model) == num_params(model) - 32 * 6 * 3 * 4096 * 14336
    assert num_active_params(model) == pytest.approx(12.9e9, rel=2e-3)


def test_qwen_active_is_as_it_is_named() -> None:
    """Qwen3 Technical Report, arXiv 2505.09388, Table 2: 3B and 22B active."""
    assert num_active_params(load_workload("qwen3-30b-a3b").model) == pytest.approx(3.3e9, rel=0.02)
    assert num_active_params(load_workload("qwen3-235b-a22b").model) == pytest.approx(22e9, rel=0.02)


@pytest.mark.parametrize(("name", "layers"), [("memfine-model-1", 16), ("memfine-model-2", 8)])
def test_reduced_models_are_deepseek_v3_less_layers(name: str, layers: int) -> None:
    whole, reduced = load_workload("deepseek-v3").model, load_workload(name).model
    sparse = layer_params(whole, moe=True).total_params
    assert num_params(whole) - num_params(reduced) == (61 - layers) * sparse


def test_windows_of_gpt_oss_alternate_from_the_first_layer() -> None:
    model = load_workload("gpt-oss-120b").model
    assert [model.is_windowed_layer(i) for i in range(4)] == [True, False, True, False]
