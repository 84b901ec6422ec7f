"""Workloads to fill in: a YAML text with every field of a kind of model, its unit and where to find it."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Union, get_args, get_origin

import yaml

from mofa.errors import SpecError
from mofa.specs.base import Spec
from mofa.specs.files import bundled_dir, load_yaml
from mofa.specs.model import ModelSpec
from mofa.specs.workload import WorkloadSpec

UNFILLED = "???"
"""Stands in a file for a value that is still to be written, as in OmegaConf."""


class FieldHint(NamedTuple):
    """What a field is, with its unit, and the keys of a Hugging Face ``config.json`` that say it as it is."""

    meaning: str
    keys: tuple[str, ...] = ()


HINTS: Mapping[str, FieldHint] = {
    "name": FieldHint("of the training job"),
    "source": FieldHint("paper, section or file that these numbers are from"),
    "tokens": FieldHint("to train on [tokens], such as 15T; leave it out where unknown"),
    "framework": FieldHint("to train with where an option names none"),
    "batch.seq_len": FieldHint("length of a training sequence [tokens]; the paper or the job, not in config.json"),
    "batch.global_batch": FieldHint("sequences of an optimizer step [sequences]; the paper or the job"),
    "model.name": FieldHint("of the model"),
    "model.source": FieldHint("where its sizes are from, such as the address of its config.json"),
    "model.num_layers": FieldHint("decoder layers", ("num_hidden_layers", "n_layer", "n_layers")),
    "model.hidden": FieldHint("width of the residual stream [elements]", ("hidden_size", "n_embd", "d_model")),
    "model.vocab": FieldHint("rows of the token embedding", ("vocab_size",)),
    "model.tied_embeddings": FieldHint("whether embedding and output layer are one matrix",
        ("tie_word_embeddings",)),
    "model.attention.kind": FieldHint("gqa: multi-head or grouped-query; mla: latent"),
    "model.attention.num_heads": FieldHint("query heads", ("num_attention_heads", "n_head", "n_heads")),
    "model.attention.num_kv_heads": FieldHint("heads of keys and values", ("num_key_value_heads",)),
    "model.attention.head_dim": FieldHint("width of a head [elements]", ("head_dim",)),
    "model.attention.q_lora_rank": FieldHint("rank of queries [elements]; leave it out without one",
        ("q_lora_rank",)),
    "model.attention.kv_lora_rank": FieldHint("rank of keys and values [elements]", ("kv_lora_rank",)),
    "model.attention.qk_nope_head_dim": FieldHint("part of a query head that is not turned [elements]",
        ("qk_nope_head_dim",)),
    "model.attention.qk_rope_head_dim": FieldHint("part of a query head that is turned [elements]",
        ("qk_rope_head_dim",)),
    "model.attention.v_head_dim": FieldHint("width of a value head [elements]", ("v_head_dim",)),
    "model.attention.qkv_bias": FieldHint("biases of queries, keys and values", ("attention_bias",)),
    "model.attention.out_bias": FieldHint("a bias of the output projection"),
    "model.attention.qk_norm": FieldHint("norms over queries and keys; the modelling code"),
    "model.attention.qk_norm_kind": FieldHint("what these norms go over: head, heads, full or unweighted"),
    "model.attention.sinks": FieldHint("a learned logit a head that joins the softmax"),
    "model.attention.window": FieldHint(
        "length of the sliding window [tokens]; config.json, where used: sliding_window"
    ),
    "model.attention.window_every": FieldHint("of so many layers the last has no window, 1: all have one [layers]"),
    "model.attention.chunked": FieldHint("windows are chunks of the sequence"),
    "model.attention.nope_every": FieldHint("every n-th layer has no rotary embedding, 0: none [layers]"),
    "model.attention.rotary_dim": FieldHint("elements of a head that are turned, where not all are [elements]"),
    "model.attention.softcap": FieldHint("scores go through a scaled tanh"),
    "model.mlp.activation": FieldHint("swiglu, geglu, gelu, relu or relu2; config.json: hidden_act, silu is swiglu"),
    "model.mlp.ffn_hidden": FieldHint("width inside a dense layer [elements]",
        ("intermediate_size", "n_inner")),
    "model.mlp.bias": FieldHint("biases of dense layers", ("mlp_bias",)),
    "model.moe.num_experts": FieldHint("routed experts of a layer",
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    "model.moe.top_k": FieldHint("experts that a token goes to",
        ("num_experts_per_tok", "moe_top_k", "moe_topk")),
    "model.moe.expert_hidden": FieldHint("width inside an expert [elements]", ("moe_intermediate_size",)),
    "model.moe.shared_hidden": FieldHint("width inside all shared experts together, 0: none [elements]",
        ("shared_expert_intermediate_size",)),
    "model.moe.shared_gate": FieldHint("a gate in front of the shared experts"),
    "model.moe.first_k_dense": FieldHint("first layers without experts [layers]", ("first_k_dense_replace",)),
    "model.moe.every": FieldHint("of later layers every n-th has experts [layers]", ("decoder_sparse_step",)),
    "model.moe.score": FieldHint("of the router: softmax or sigmoid", ("scoring_func",)),
    "model.moe.num_groups": FieldHint("groups of experts, one a node", ("n_group",)),
    "model.moe.groups_per_token": FieldHint("groups that a token goes to at most", ("topk_group",)),
    "model.moe.correction_bias": FieldHint("a bias an expert that only steers the choice"),
    "model.moe.router_bias": FieldHint("a bias of the router"),
    "model.moe.expert_bias": FieldHint("biases of experts"),
    "model.norm": FieldHint("rmsnorm or layernorm"),
    "model.norm_bias": FieldHint("whether LayerNorms have a bias"),
    "model.norm_placement": FieldHint("norms stand before attention and feed-forward, after, or both"),
    "model.parallel_branches": FieldHint("attention and feed-forward read one stream side by side"),
    "model.shared_branch_norm": FieldHint("both read one norm's output"),
    "model.positions": FieldHint("rope, learned or alibi"),
    "model.max_positions": FieldHint("rows of a learned position embedding; config.json: max_position_embeddings"),
    "model.rope_scale": FieldHint("YaRN's factor of cosine and sine, 0.1 ln s + 1 for positions stretched s times"),
    "model.embedding_norm": FieldHint("a norm behind the token embedding"),
    "model.head_bias": FieldHint("a bias of the output layer"),
    "model.logit_softcap": FieldHint("logits go through a scaled tanh"),
    "model.multipliers": FieldHint("what is multiplied by a constant: embedding, branches, logits"),
    "model.dropout": FieldHint("dropped share of activations"),
    "model.num_mtp_layers": FieldHint("multi-token-prediction layers", ("num_nextn_predict_layers",)),
}  # fmt: skip
"""Every field that a template may have, by its path."""
LEFT_OUT = ("model.layers", "precision", "optimizer", "routing", "notes")
"""Parts that a template names at its end only: they describe other models, or have defaults of their own."""


def workload_template(
    like: str, config: Mapping[str, Any] | None = None, name: str = UNFILLED, model: ModelSpec | None = None
) -> str:
    """A workload's YAML text to fill in, with the fields of a bundled one.

    Parameters
    ----------
    like
        The bundled workload. Its choices of kinds stay; its numbers are left to be filled in, and stand in comments.
    config
        The language model's part of a Hugging Face ``config.json``, whose keys that mofa understands are filled in.
    name
        What to call the job and the model.
    model
        What the file's class makes of its keys, where mofa reads it: all its fields are filled in. Keys of other
        classes are taken by their names.

    Returns
    -------
    str
        A field a line, with what it is, its unit and where to find it; fields that have defaults are comments.

    Raises
    ------
    SpecError
        If the model has other kinds of layers than the bundled workload.
    """
    raw = load_yaml(bundled_dir("workloads") / f"{like}.yaml", f"workloads/{like}.yaml")
    names = {} if name == UNFILLED else {"name": name, "model.name": name}
    if config is not None:
        names |= dict.fromkeys(("source", "model.source"), f"Hugging Face config.json of {name}")
    known = _known(config or {})
    if model is not None:
        known = _facts_of(model)
        _refuse_other_kinds(raw["model"], model, like)
        if model.moe is None:
            raw["model"].pop("moe", None)
    lines = [
        f"# A workload like {like}: write a value in place of each {UNFILLED}, and uncomment what is not the default.",
        "# Check it by mofa show workload FILE, whose num_params is to equal the published count.",
        *_lines(WorkloadSpec, raw, "", like, {**known, **names}),
        f"# Defaults of precision, optimizer and routing: mofa show workload {like}.",
    ]
    return "\n".join(lines) + "\n"


def refuse_unfilled(raw: Mapping[str, Any], where: str) -> None:
    """Refuse a workload with values that are still to be written, all of them by name.

    Raises
    ------
    SpecError
        If a value is :data:`UNFILLED`.
    """
    paths = list(_unfilled(raw, ""))
    if paths:
        raise SpecError(f"{where}: {', '.join(paths)}: still {UNFILLED}; write the values, the comments say where from")


def _unfilled(raw: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield from _unfilled(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                yield from _unfilled({f"{key}[{i}]": item}, prefix)
        elif value == UNFILLED:
            yield f"{prefix}{key}"


def _lines(cls: type[Spec], raw: Mapping[str, Any], prefix: str, like: str, known: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one mapping and of those in it, in the order of its fields."""
    indent = "  " * prefix.count(".")
    for field, info in cls.model_fields.items():
        path = f"{prefix}{field}"
        inner = _spec_of(info.annotation, raw.get(field))
        if path in LEFT_OUT or (inner is not None and field not in raw):
            continue
        if inner is not None:
            yield f"{indent}{field}:{_OF_BLOCKS.get(path, '')}"
            yield from _lines(inner, raw[field], f"{path}.", like, known)
        elif field in raw or info.is_required() or known.get(path, info.default) != info.default:
            yield f"{indent}{_line(path, field, raw.get(field, info.default), like, known, field in raw)}"
        elif info.default is None:
            yield f"{indent}# {field}:  # {_comment(path)}"
        else:
            yield f"{indent}# {field}: {_scalar(info.default)}  # {_comment(path)}"


def _line(path: str, field: str, value: object, like: str, known: Mapping[str, Any], given: bool) -> str:
    """One field: filled in where it is known, as the bundled workload has it where it is a choice."""
    if path in known:
        return f"{field}: {_scalar(known[path])}  # {_comment(path)}"
    is_choice = isinstance(value, bool) or path in _CHOICES
    if is_choice:
        return f"{field}: {_scalar(value)}  # {_comment(path)}"
    has_example = given and (value is None or isinstance(value, (int, float)))
    example = f"; {like}: {_scalar(value)}" if has_example else ""
    return f"{field}: {UNFILLED}  # {_comment(path)}{example}"


_CHOICES = ("model.attention.kind", "model.attention.qk_norm_kind", "model.mlp.activation", "model.moe.score",
            "model.norm", "model.norm_placement", "model.positions", "framework")  # fmt: skip


_OF_BLOCKS = {"model.moe": "  # leave these lines out where all layers are dense"}


def _comment(path: str) -> str:
    hint = HINTS[path]
    return f"{hint.meaning}; config.json: {', '.join(hint.keys)}" if hint.keys else hint.meaning


def _scalar(value: object) -> str:
    """A value as YAML writes it on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    return str(yaml.safe_dump(plain, default_flow_style=True, width=10_000)).removesuffix("\n").removesuffix("\n...")


def _known(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that keys of a config say as they are, by path."""
    known = {}
    for path, hint in HINTS.items():
        value = next((config[key] for key in hint.keys if config.get(key) is not None), None)
        if isinstance(value, (bool, int)) or (path == "model.moe.score" and value in ("softmax", "sigmoid")):
            known[path] = value
    return known


def bundled_workload_like(model: ModelSpec) -> str:
    """The bundled workload of a model's kinds of attention and layers."""
    if model.attention_kind.megatron.has_latents:
        return "deepseek-v3"
    return "llama3-8b" if model.moe is None else "qwen3-30b-a3b"


def _facts_of(model: ModelSpec) -> dict[str, Any]:
    """All facts of a model by path, but its name and source."""
    facts: dict[str, Any] = {}
    for field, value in model.model_dump().items():
        if isinstance(value, dict):
            facts |= {f"model.{field}.{inner}": fact for inner, fact in value.items()}
        else:
            facts[f"model.{field}"] = value
    return {path: fact for path, fact in facts.items() if path in HINTS and path not in ("model.name", "model.source")}


def _refuse_other_kinds(raw: Mapping[str, Any], model: ModelSpec, like: str) -> None:
    """Refuse a bundled workload whose attention is of another kind, or that lacks the model's experts."""
    kind, nearest = raw["attention"].get("kind"), bundled_workload_like(model)
    if kind != model.attention.kind:
        raise SpecError(f"--like {like}: has {kind} attention, the file's class {model.attention.kind}; use {nearest}")
    if model.moe is not None and "moe" not in raw:
        raise SpecError(f"--like {like}: has no experts, the file's class has; use {nearest}")


def _spec_of(annotation: Any, raw: object) -> type[Spec] | None:
    """The spec that a field holds: of several that of the file's ``kind``."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = [m for m in get_args(annotation) if isinstance(m, type) and issubclass(m, Spec)]
        kind = raw.get("kind") if isinstance(raw, Mapping) else None
        tagged = [m for m in members if "kind" in m.model_fields and m.model_fields["kind"].default == kind]
        return next(iter(tagged or members), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, Spec) else None
