"""Layers of several shapes: MiMo-V2-Flash, LongCat-Flash, Step-3, and DeciLM, which a search has shaped."""

from __future__ import annotations

from typing import Any

from mofa.specs.files import shown_value
from mofa.specs.huggingface.deepseek import latent_attention_keys
from mofa.specs.huggingface.hybrids.layer_fields import (
    ATTENTION,
    DENSE_OR_EXPERTS,
    FULL_OR_WINDOWED,
    MLP,
    MOE,
    layer_kind_fields,
    layers_field,
    listed_layer_kinds,
    sigmoid_grouped_moe_fields,
)
from mofa.specs.huggingface.record import (
    REQUIRED,
    Config,
    ConfigFamily,
    count_key,
    flag_key,
    list_key,
    size_key,
    text_key,
)
from mofa.specs.huggingface.shared_keys import (
    activation_field_without_mlp,
    common_keys,
    gated_mlp_fields,
    gqa_fields,
    latent_attention_fields,
    moe_fields,
    rotary_dim_field,
    rotary_share_key,
)


def _mimo_v2(config: Config) -> dict[str, Any]:
    """Windowed layers have key-value heads and sinks of their own."""
    bias = config["attention_bias"]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=False, v_head_dim=config["v_head_dim"],
                    sinks=config["add_full_attention_sink_bias"], **rotary_dim_field(config))  # fmt: skip
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
        names = listed_layer_kinds(config, "layer_types", FULL_OR_WINDOWED)
    elif config["hybrid_layer_pattern"] is not None:
        names = listed_layer_kinds(config, "hybrid_layer_pattern", {0: "full", 1: "windowed"})
    else:
        names = ["full" if i == 0 or (i + 1) % 6 == 0 else "windowed" for i in range(given)]
    if config["mlp_layer_types"] is not None:
        ffns = listed_layer_kinds(config, "mlp_layer_types", DENSE_OR_EXPERTS)
    elif config["moe_layer_freq"] is not None:
        ffns = listed_layer_kinds(config, "moe_layer_freq", {0: "mlp", 1: "moe"})
    else:
        ffns = ["mlp", *["moe"] * (given - 1)]
    each = [
        layer_kind_fields(f"{name}-{ffn}", [mixers[name]], [{"kind": ffn}])
        for name, ffn in zip(names, ffns, strict=True)
    ]
    fields = sigmoid_grouped_moe_fields(config)
    return {"attention": attention, "mlp": gated_mlp_fields(config), "moe": fields, **layers_field(each)}


def _longcat(config: Config) -> dict[str, Any]:
    """Two attentions and two dense feed-forwards a layer, and experts beside the second half of them."""
    both = layer_kind_fields("shortcut", [ATTENTION, ATTENTION], [MLP, MLP, MOE], norms=4)
    fields = moe_fields(config, num_experts="n_routed_experts", correction_bias=True, router_bias=config["router_bias"])
    more = {"zero_experts": config["zero_expert_num"]}
    return {"attention": latent_attention_fields(config), "mlp": gated_mlp_fields(config), "moe": fields,
            **layers_field([both] * config["num_hidden_layers"], **more)}  # fmt: skip


def _step3(config: Config) -> dict[str, Any]:
    """Queries of all heads are made from one; layers 4 to 59 have experts unless the file lists others."""
    sparse = set(range(4, 60)) if config["moe_layers_enum"] is None else _numbers(config["moe_layers_enum"])
    mixer = {"kind": "factorized", "q_rank": config["share_q_dim"]}
    named = {ffn["kind"]: layer_kind_fields(ffn["kind"], [mixer], [ffn]) for ffn in (MLP, MOE)}
    each = [named["moe" if i in sparse else "mlp"] for i in range(config["num_hidden_layers"])]
    attention = {**gqa_fields(config), "num_kv_heads": config["num_attention_groups"]}
    fields = moe_fields(config, num_experts="moe_num_experts", shared_hidden=config["share_expert_dim"])
    return {"attention": attention, "mlp": gated_mlp_fields(config), "moe": fields, **layers_field(each)}


def _numbers(given: Any) -> set[int]:
    """Layers' numbers as a list, or as text with commas between them."""
    listed_ = given.split(",") if isinstance(given, str) else given
    try:
        return {int(number) for number in listed_}
    except (TypeError, ValueError):
        raise ValueError(f"moe_layers_enum ({shown_value(given)}) must list numbers of layers; correct it") from None


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
    attention = {**gqa_fields(config, qkv_bias=bias, out_bias=bias), "num_kv_heads": most}
    each = []
    for kv, width in read:
        own = ATTENTION if kv == most else {"kind": "other_attention", "shape": {**attention, "num_kv_heads": kv}}
        name = "none" if kv is None else "attention" if kv == most else f"attention-{kv}"
        ffns = [] if width is None else [{**MLP, "ffn_hidden": width}]
        each.append(layer_kind_fields(f"{name}-{width or 'none'}", [] if kv is None else [own], ffns))
    return {
        "attention": attention,
        "mlp": {**activation_field_without_mlp(config), "bias": config["mlp_bias"]},
        **layers_field(each),
    }


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
            raise ValueError(f"{where}.attention.n_heads_in_group ({shown_value(group)}) must divide the {heads} heads")
        kv = heads // group
    width = None
    if not ffn.get("no_op"):
        multiple = ffn.get("ffn_mult")
        if not isinstance(multiple, (int, float)) or isinstance(multiple, bool) or not 0 < multiple < 1000:
            raise ValueError(f"{where}.ffn.ffn_mult ({shown_value(multiple)}) must be a multiple of the hidden width")
        width = -(-int(2 * multiple * hidden / 3) // 256) * 256
    if kv is None and width is None:
        raise ValueError(f"{where} has neither attention nor ffn; leave the layer out")
    return kv, width


ARCHITECTURES = (
    ConfigFamily(
        "MiMoV2FlashConfig", ("MiMoV2FlashForCausalLM",), ("mimo_v2_flash",),
        {**common_keys(4096, 48, 64, 16384, 152576), "num_key_value_heads": size_key(4), "head_dim": size_key(192),
         "v_head_dim": size_key(128), **rotary_share_key(0.334), "attention_bias": flag_key(False),
         "sliding_window": size_key(129),
         "swa_num_attention_heads": size_key(None), "swa_num_key_value_heads": size_key(None),
         "swa_head_dim": size_key(None),
         "swa_v_head_dim": size_key(None), "add_swa_attention_sink_bias": flag_key(True),
         "add_full_attention_sink_bias": flag_key(False), "hybrid_layer_pattern": list_key(), "layer_types": list_key(),
         "moe_layer_freq": list_key(), "mlp_layer_types": list_key(), "n_routed_experts": size_key(256),
         "num_experts_per_tok": size_key(8), "moe_intermediate_size": size_key(2048), "n_group": size_key(1),
         "topk_group": size_key(1)}, _mimo_v2,
    ),
    ConfigFamily(
        "LongcatFlashConfig", ("LongcatFlashForCausalLM",), ("longcat_flash",),
        {**common_keys(6144, 28, 64, None, 131072), "num_hidden_layers": size_key(28, "num_layers"),
         "intermediate_size": size_key(12288, "ffn_hidden_size"), **latent_attention_keys(1536, 512, 128, 64, 128),
         "n_routed_experts": size_key(512), "zero_expert_num": count_key(256), "router_bias": flag_key(False),
         "num_experts_per_tok": size_key(12, "moe_topk"),
         "moe_intermediate_size": size_key(2048, "expert_ffn_hidden_size")},
        _longcat,
    ),
    ConfigFamily(
        "Step3TextConfig", ("Step3TextForCausalLM", "Step3VLForConditionalGeneration"), ("step3_text", "step3_vl"),
        {**common_keys(7168, 61, 64, 18432, 128815), "num_attention_groups": size_key(1), "head_dim": size_key(256),
         "share_q_dim": size_key(2048), "moe_num_experts": size_key(48),
         "num_experts_per_tok": size_key(3, "moe_top_k"),
         "moe_intermediate_size": size_key(5120), "share_expert_dim": count_key(5120),
         "moe_layers_enum": text_key(None)}, _step3,
        remote="stepfun-ai/step3",
    ),
    ConfigFamily(
        "DeciLMConfig", ("DeciLMForCausalLM",), ("nemotron-nas", "deci"),
        {**common_keys(REQUIRED, REQUIRED, REQUIRED, None, REQUIRED), "attention_bias": flag_key(False),
         "mlp_bias": flag_key(False),
         "block_configs": list_key(default=REQUIRED)}, _decilm, remote="nvidia/Llama-3_3-Nemotron-Super-49B-v1",
    ),
)  # fmt: skip
