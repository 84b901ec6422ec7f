"""Layers of several shapes: MiMo-V2-Flash, LongCat-Flash, Step-3, and DeciLM, which a search has shaped."""

from __future__ import annotations

from typing import Any

from mofa.specs.files import short
from mofa.specs.huggingface.deepseek import latent_sizes
from mofa.specs.huggingface.hybrids.layer_fields import (
    ATTENTION,
    DENSE_OR_EXPERTS,
    FULL_OR_WINDOWED,
    MLP,
    MOE,
    grouped_experts,
    kind,
    layers,
    listed,
)
from mofa.specs.huggingface.record import REQUIRED, Architecture, Config, count, entries, flag, size, text
from mofa.specs.huggingface.shared_keys import (
    experts_only,
    gated_mlp,
    gqa,
    latent_attention,
    moe,
    rotary,
    rotary_dim,
    sizes,
)


def _mimo_v2(config: Config) -> dict[str, Any]:
    """Windowed layers have key-value heads and sinks of their own."""
    bias = config["attention_bias"]
    attention = gqa(config, qkv_bias=bias, out_bias=False, v_head_dim=config["v_head_dim"],
                    sinks=config["add_full_attention_sink_bias"], **rotary_dim(config))  # fmt: skip
    windowed = {
        **attention, "num_heads": config["swa_num_attention_heads"] or attention["num_heads"],
        "num_kv_heads": config["swa_num_key_value_heads"] or 2 * attention["num_kv_heads"],
        "head_dim": config["swa_head_dim"] or attention["head_dim"],
        "v_head_dim": config["swa_v_head_dim"] or config["v_head_dim"],
        "sinks": config["add_swa_attention_sink_bias"], "window": config["sliding_window"],
    }  # fmt: skip
    mixers = {"full": ATTENTION, "windowed": {"kind": "other_attention", "shape": windowed}}
    given = config["num_hidden_layers"]
    if config["layer_types"] is not None:
        names = listed(config, "layer_types", FULL_OR_WINDOWED)
    elif config["hybrid_layer_pattern"] is not None:
        names = listed(config, "hybrid_layer_pattern", {0: "full", 1: "windowed"})
    else:
        names = ["full" if i == 0 or (i + 1) % 6 == 0 else "windowed" for i in range(given)]
    if config["mlp_layer_types"] is not None:
        ffns = listed(config, "mlp_layer_types", DENSE_OR_EXPERTS)
    elif config["moe_layer_freq"] is not None:
        ffns = listed(config, "moe_layer_freq", {0: "mlp", 1: "moe"})
    else:
        ffns = ["mlp", *["moe"] * (given - 1)]
    each = [kind(f"{name}-{ffn}", [mixers[name]], [{"kind": ffn}]) for name, ffn in zip(names, ffns, strict=True)]
    fields = grouped_experts(config)
    return {"attention": attention, "mlp": gated_mlp(config), "moe": fields, **layers(each)}


def _longcat(config: Config) -> dict[str, Any]:
    """Two attentions and two dense feed-forwards a layer, and experts beside the second half of them."""
    both = kind("shortcut", [ATTENTION, ATTENTION], [MLP, MLP, MOE], norms=4)
    fields = moe(config, num_experts="n_routed_experts", correction_bias=True, router_bias=config["router_bias"])
    more = {"zero_experts": config["zero_expert_num"]}
    return {"attention": latent_attention(config), "mlp": gated_mlp(config), "moe": fields,
            **layers([both] * config["num_hidden_layers"], **more)}  # fmt: skip


def _step3(config: Config) -> dict[str, Any]:
    """Queries of all heads are made from one; layers 4 to 59 have experts unless the file lists others."""
    sparse = set(range(4, 60)) if config["moe_layers_enum"] is None else _numbers(config["moe_layers_enum"])
    mixer = {"kind": "factorized", "q_rank": config["share_q_dim"]}
    named = {ffn["kind"]: kind(ffn["kind"], [mixer], [ffn]) for ffn in (MLP, MOE)}
    each = [named["moe" if i in sparse else "mlp"] for i in range(config["num_hidden_layers"])]
    attention = {**gqa(config), "num_kv_heads": config["num_attention_groups"]}
    fields = moe(config, num_experts="moe_num_experts", shared_hidden=config["share_expert_dim"])
    return {"attention": attention, "mlp": gated_mlp(config), "moe": fields, **layers(each)}


def _numbers(given: Any) -> set[int]:
    """Layers' numbers as a list, or as text with commas between them."""
    listed_ = given.split(",") if isinstance(given, str) else given
    try:
        return {int(number) for number in listed_}
    except (TypeError, ValueError):
        raise ValueError(f"moe_layers_enum ({short(given)}) must list numbers of layers; correct it") from None


def _decilm(config: Config) -> dict[str, Any]:
    """Each layer's block says its key-value heads and its feed-forward's width, or that it has none."""
    blocks, heads, hidden = config["block_configs"], config["num_attention_heads"], config["hidden_size"]
    if blocks is None:
        raise ValueError("block_configs is null; list a block for each layer")
    if len(blocks) != config["num_hidden_layers"]:
        raise ValueError(
            f"block_configs lists {len(blocks)} layers, num_hidden_layers is {config['num_hidden_layers']}"
        )
    read = [_block(i, block, heads, hidden) for i, block in enumerate(blocks)]
    groups = [kv for kv, _ in read if kv is not None]
    if not groups:
        raise ValueError("block_configs has no attention; mofa has no model without any")
    most = max(groups, key=groups.count)
    bias = config["attention_bias"]
    attention = {**gqa(config, qkv_bias=bias, out_bias=bias), "num_kv_heads": most}
    each = []
    for kv, width in read:
        own = ATTENTION if kv == most else {"kind": "other_attention", "shape": {**attention, "num_kv_heads": kv}}
        name = "none" if kv is None else "attention" if kv == most else f"attention-{kv}"
        ffns = [] if width is None else [{**MLP, "ffn_hidden": width}]
        each.append(kind(f"{name}-{width or 'none'}", [] if kv is None else [own], ffns))
    return {"attention": attention, "mlp": {**experts_only(config), "bias": config["mlp_bias"]}, **layers(each)}


def _block(number: int, block: Any, heads: int, hidden: int) -> tuple[int | None, int | None]:
    """Key-value heads and width of one layer, None for a part that it lacks.

    The width is two thirds of the multiple of the hidden width, up to a multiple of 256 (NVIDIA's
    ``configuration_decilm.py``).
    """
    where = f"block_configs[{number}]"
    attention, ffn = (block.get(key) if isinstance(block, dict) else None for key in ("attention", "ffn"))
    if not isinstance(attention, dict) or not isinstance(ffn, dict):
        raise ValueError(f"{where} must be an object with attention and ffn; correct it")
    for name, part in (("attention", attention), ("ffn", ffn)):
        if part.get("replace_with_linear"):
            raise ValueError(f"{where}.{name} is replaced by a linear layer; mofa has no such layer")
    kv = None
    if not attention.get("no_op"):
        group = attention.get("n_heads_in_group")
        if not isinstance(group, int) or isinstance(group, bool) or group < 1 or heads % group:
            raise ValueError(f"{where}.attention.n_heads_in_group ({short(group)}) must divide the {heads} heads")
        kv = heads // group
    width = None
    if not ffn.get("no_op"):
        multiple = ffn.get("ffn_mult")
        if not isinstance(multiple, (int, float)) or isinstance(multiple, bool) or not 0 < multiple < 1000:
            raise ValueError(f"{where}.ffn.ffn_mult ({short(multiple)}) must be a multiple of the hidden width")
        width = -(-int(2 * multiple * hidden / 3) // 256) * 256
    if kv is None and width is None:
        raise ValueError(f"{where} has neither attention nor ffn; leave the layer out")
    return kv, width


ARCHITECTURES = (
    Architecture(
        "MiMoV2FlashConfig", ("MiMoV2FlashForCausalLM",), ("mimo_v2_flash",),
        {**sizes(4096, 48, 64, 16384, 152576), "num_key_value_heads": size(4), "head_dim": size(192),
         "v_head_dim": size(128), **rotary(0.334), "attention_bias": flag(False), "sliding_window": size(129),
         "swa_num_attention_heads": size(None), "swa_num_key_value_heads": size(None), "swa_head_dim": size(None),
         "swa_v_head_dim": size(None), "add_swa_attention_sink_bias": flag(True),
         "add_full_attention_sink_bias": flag(False), "hybrid_layer_pattern": entries(), "layer_types": entries(),
         "moe_layer_freq": entries(), "mlp_layer_types": entries(), "n_routed_experts": size(256),
         "num_experts_per_tok": size(8), "moe_intermediate_size": size(2048), "n_group": size(1),
         "topk_group": size(1)}, _mimo_v2,
    ),
    Architecture(
        "LongcatFlashConfig", ("LongcatFlashForCausalLM",), ("longcat_flash",),
        {**sizes(6144, 28, 64, None, 131072), "num_hidden_layers": size(28, "num_layers"),
         "intermediate_size": size(12288, "ffn_hidden_size"), **latent_sizes(1536, 512, 128, 64, 128),
         "n_routed_experts": size(512), "zero_expert_num": count(256), "router_bias": flag(False),
         "num_experts_per_tok": size(12, "moe_topk"), "moe_intermediate_size": size(2048, "expert_ffn_hidden_size")},
        _longcat,
    ),
    Architecture(
        "Step3TextConfig", ("Step3TextForCausalLM", "Step3VLForConditionalGeneration"), ("step3_text", "step3_vl"),
        {**sizes(7168, 61, 64, 18432, 128815), "num_attention_groups": size(1), "head_dim": size(256),
         "share_q_dim": size(2048), "moe_num_experts": size(48), "num_experts_per_tok": size(3, "moe_top_k"),
         "moe_intermediate_size": size(5120), "share_expert_dim": count(5120), "moe_layers_enum": text(None)}, _step3,
        remote="stepfun-ai/step3",
    ),
    Architecture(
        "DeciLMConfig", ("DeciLMForCausalLM",), ("nemotron-nas", "deci"),
        {**sizes(REQUIRED, REQUIRED, REQUIRED, None, REQUIRED), "attention_bias": flag(False), "mlp_bias": flag(False),
         "block_configs": entries(default=REQUIRED)}, _decilm, remote="nvidia/Llama-3_3-Nemotron-Super-49B-v1",
    ),
)  # fmt: skip
