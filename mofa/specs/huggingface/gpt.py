"""GPT-2, BioGPT, StarCoder, GPT-J, CodeGen, GPT-NeoX, OPT, BLOOM, MPT, Falcon, Nemotron-4: LayerNorm, plain layers."""

from __future__ import annotations

from typing import Any

from mofa.specs.huggingface.olmo import clipped_qkv_note
from mofa.specs.huggingface.record import Config, ConfigFamily, count_key, flag_key, number_key, size_key, text_key
from mofa.specs.huggingface.shared_keys import (
    HEAD_DIM,
    KV_HEADS,
    common_keys,
    four_times_hidden,
    gpt2_common_keys,
    gqa_fields,
    hidden_over_heads,
    kv_heads_as_query_heads,
    refuse_other_value,
    rotary_dim_field,
    rotary_share_key,
    ungated_mlp_fields,
)

_NORM = {"norm": "layernorm"}


def _gpt2(config: Config) -> dict[str, Any]:
    raw = {
        "attention": gqa_fields(config, qkv_bias=True, out_bias=True),
        "mlp": ungated_mlp_fields(config, bias=True),
        **_NORM,
    }
    return {**raw, "positions": "learned", "max_positions": config["max_position_embeddings"]}


def _gpt_bigcode(config: Config) -> dict[str, Any]:
    raw = _gpt2(config)
    return {**raw, "attention": {**raw["attention"], "num_kv_heads": 1}} if config["multi_query"] else raw


def _gptj(config: Config) -> dict[str, Any]:
    width = hidden_over_heads(config)
    turned = config["rotary_dim"] or width
    rotation: dict[str, Any] = {} if turned == width else {"rotary_dim": turned}
    raw = {
        "attention": gqa_fields(config, **rotation),
        "mlp": ungated_mlp_fields(config, bias=True),
        **_NORM,
        "head_bias": True,
    }
    return {**raw, "parallel_branches": True, "shared_branch_norm": True}


def _gpt_neox(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    attention = gqa_fields(
        config, qkv_bias=bias, out_bias=bias, **rotary_dim_field({**config, "head_dim": hidden_over_heads(config)})
    )
    raw = {"attention": attention, "mlp": ungated_mlp_fields(config, bias=True), **_NORM}
    return {**raw, "parallel_branches": config["use_parallel_residual"]}


def _opt(config: Config) -> dict[str, Any]:
    """OPT keeps two rows of positions ahead of the first token's."""
    refuse_other_value(config, "do_layer_norm_before", True, "norms behind the residual sum")
    refuse_other_value(config, "layer_norm_elementwise_affine", True, "norms without weights")
    refuse_other_value(config, "_remove_final_layer_norm", False, "model without a final norm")
    if config["word_embed_proj_dim"] != config["hidden_size"]:
        raise ValueError(
            f"word_embed_proj_dim ({config['word_embed_proj_dim']}) is not hidden_size ({config['hidden_size']}); "
            "mofa has no projection of embeddings"
        )
    bias = config["enable_bias"]
    raw = {
        "attention": gqa_fields(config, qkv_bias=bias, out_bias=bias),
        "mlp": ungated_mlp_fields(config, bias=bias),
        **_NORM,
    }
    return {**raw, "positions": "learned", "max_positions": config["max_position_embeddings"] + 2}


def _biogpt(config: Config) -> dict[str, Any]:
    """BioGPT keeps two rows of positions ahead of the first token's, as OPT does."""
    refuse_other_value(config, "layerdrop", 0, "layers that are skipped at random")
    raw = {
        "attention": gqa_fields(config, qkv_bias=True, out_bias=True),
        "mlp": ungated_mlp_fields(config, bias=True),
        **_NORM,
    }
    scaled = {"multipliers": ("embedding",)} if config["scale_embedding"] else {}
    return {**raw, "positions": "learned", "max_positions": config["max_position_embeddings"] + 2, **scaled}


def _bloom(config: Config) -> dict[str, Any]:
    refuse_other_value(config, "apply_residual_connection_post_layernorm", False, "residual behind a norm")
    config = {**config, "hidden_act": "gelu", "intermediate_size": four_times_hidden(config)}
    raw = {
        "attention": gqa_fields(config, qkv_bias=True, out_bias=True),
        "mlp": ungated_mlp_fields(config, bias=True),
        **_NORM,
    }
    return {**raw, "positions": "alibi", "embedding_norm": True}


def _mpt(config: Config) -> dict[str, Any]:
    refuse_other_value(config, "no_bias", True, "such biases of its class")
    refuse_other_value(config, "attn_config.qk_ln", False, "such norm of queries and keys")
    refuse_other_value(config, "attn_config.alibi", True, "MPT without ALiBi")
    config = {**config, "hidden_act": "gelu", "intermediate_size": 4 * config["hidden_size"]}
    raw = {"attention": gqa_fields(config), "mlp": ungated_mlp_fields(config, bias=False), **_NORM}
    return {**raw, "norm_bias": False, "positions": "alibi"}


def _falcon(config: Config) -> dict[str, Any]:
    bias, new = config["bias"], config["new_decoder_architecture"]
    kv_heads = config["num_kv_heads"] if new else 1 if config["multi_query"] else kv_heads_as_query_heads(config)
    parallel = new or config["parallel_attn"]
    one_norm = parallel and (not new or config["num_ln_in_parallel_attn"] == 1)
    attention = {**gqa_fields(config, qkv_bias=bias, out_bias=bias), "num_kv_heads": kv_heads}
    return {
        "attention": attention, "mlp": ungated_mlp_fields(config, bias=bias), **_NORM, "parallel_branches": parallel,
        "shared_branch_norm": one_norm, "positions": "alibi" if config["alibi"] else "rope",
    }  # fmt: skip


def _nemotron(config: Config) -> dict[str, Any]:
    bias = config["attention_bias"]
    attention = gqa_fields(config, qkv_bias=bias, out_bias=bias, **rotary_dim_field(config))
    return {"attention": attention, "mlp": ungated_mlp_fields(config, bias=config["mlp_bias"]), **_NORM}


def _clipped(config: Config) -> tuple[str, ...]:
    return clipped_qkv_note({"clip_qkv": config["attn_config.clip_qkv"]})


_POSITIONS = size_key(1024, "n_positions", "max_position_embeddings")

ARCHITECTURES = (
    ConfigFamily(
        "GPT2Config", ("GPT2LMHeadModel",), ("gpt2", "gpt-sw3"),
        {**gpt2_common_keys(768, 12, 12, 50257, "gelu_new", tied=True), "max_position_embeddings": _POSITIONS}, _gpt2,
    ),
    ConfigFamily(
        "GPTBigCodeConfig", ("GPTBigCodeForCausalLM",), ("gpt_bigcode",),
        {**gpt2_common_keys(768, 12, 12, 50257, "gelu_pytorch_tanh", tied=True), "max_position_embeddings": _POSITIONS,
         "multi_query": flag_key(True)}, _gpt_bigcode,
    ),
    ConfigFamily(
        "GPTJConfig", ("GPTJForCausalLM",), ("gptj",),
        {**gpt2_common_keys(4096, 28, 16, 50400, "gelu_new", tied=False), "rotary_dim": size_key(64, nullable=True)},
         _gptj,
    ),
    ConfigFamily(
        "CodeGenConfig", ("CodeGenForCausalLM",), ("codegen",),
        {**gpt2_common_keys(4096, 28, 16, 50400, "gelu_new", tied=False), "rotary_dim": size_key(64, nullable=True)},
         _gptj,
    ),
    ConfigFamily(
        "GPTNeoXConfig", ("GPTNeoXForCausalLM",), ("gpt_neox",),
        {**common_keys(6144, 44, 64, 24576, 50432, "gelu"), "use_parallel_residual": flag_key(True),
         "attention_bias": flag_key(True),
         "partial_rotary_factor": number_key(0.25, "rotary_pct", "partial_rotary_factor",
                                         "rope_parameters.partial_rotary_factor")}, _gpt_neox,
    ),
    ConfigFamily(
        "OPTConfig", ("OPTForCausalLM",), ("opt",),
        {**common_keys(768, 12, 12, None, 50272, tied=True), "intermediate_size": size_key(3072, "ffn_dim"),
         "hidden_act": text_key("relu", "activation_function"), "max_position_embeddings": size_key(2048),
         "do_layer_norm_before": flag_key(True), "_remove_final_layer_norm": flag_key(False),
         "word_embed_proj_dim": size_key(None, rule=lambda c: c["hidden_size"]), "enable_bias": flag_key(True),
         "layer_norm_elementwise_affine": flag_key(True)}, _opt,
    ),
    ConfigFamily(
        "BioGptConfig", ("BioGptForCausalLM",), ("biogpt",),
        {**common_keys(1024, 24, 16, 4096, 42384, "gelu", tied=True), "max_position_embeddings": size_key(1024),
         "scale_embedding": flag_key(True), "layerdrop": number_key(0.0)}, _biogpt,
    ),
    ConfigFamily(
        "BloomConfig", ("BloomForCausalLM",), ("bloom",),
        {"hidden_size": size_key(64, "hidden_size", "n_embed"),
         "num_hidden_layers": size_key(2, "n_layer", "num_hidden_layers"),
         "num_attention_heads": size_key(8, "n_head", "num_attention_heads"), "vocab_size": size_key(250880),
         "tie_word_embeddings": flag_key(True), "apply_residual_connection_post_layernorm": flag_key(False)}, _bloom,
    ),
    ConfigFamily(
        "MptConfig", ("MPTForCausalLM", "MptForCausalLM"), ("mpt",),
        {"hidden_size": size_key(2048, "d_model", "hidden_size"),
         "num_hidden_layers": size_key(24, "n_layers", "num_hidden_layers"),
         "num_attention_heads": size_key(16, "n_heads", "num_attention_heads"), "vocab_size": size_key(50368),
         "tie_word_embeddings": flag_key(True), "no_bias": flag_key(True), "attn_config.alibi": flag_key(True),
         "attn_config.qk_ln": flag_key(False), "attn_config.clip_qkv": number_key(None)}, _mpt, left_out=_clipped,
    ),
    ConfigFamily(
        "FalconConfig", ("FalconForCausalLM", "RWForCausalLM"), ("falcon", "RefinedWeb", "RefinedWebModel"),
        {**common_keys(4544, 32, 71, None, 65024, tied=True), "hidden_size": size_key(4544, "hidden_size", "n_embed"),
         "num_hidden_layers": size_key(32, "num_hidden_layers", "n_layer"),
         "num_attention_heads": size_key(71, "num_attention_heads", "n_head"),
         "hidden_act": text_key("gelu", "activation"),
         "intermediate_size": size_key(None, "ffn_hidden_size", rule=four_times_hidden),
         "num_kv_heads": size_key(None, "num_kv_heads", "n_head_kv", rule=kv_heads_as_query_heads),
         "alibi": flag_key(False),
         "new_decoder_architecture": flag_key(False), "multi_query": flag_key(True), "parallel_attn": flag_key(True),
         "bias": flag_key(False), "num_ln_in_parallel_attn": count_key(None)}, _falcon,
    ),
    ConfigFamily(
        "NemotronConfig", ("NemotronForCausalLM",), ("nemotron",),
        {**common_keys(6144, 32, 48, 24576, 256000, "relu2"), "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
         **rotary_share_key(0.5), "attention_bias": flag_key(False), "mlp_bias": flag_key(False)}, _nemotron,
    ),
)  # fmt: skip
