"""What people ask for that is not modelled, each with the nearest that is; and other names of what is.

The first is refused by name where it is written, and README.md lists it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple


class UnmodelledMethod(NamedTuple):
    """A method that no prediction covers."""

    name: str
    """As the field writes it."""
    words: tuple[str, ...]
    """As people write it, small and without dashes and underscores."""
    nearest: str
    """What to take in its place."""


NOT_MODELLED = (
    UnmodelledMethod(
        "LoRA",
        ("lora", "qlora", "dora", "peft", "adapter", "adapters", "lorarank", "lorar"),
        "training all weights, which takes more memory",
    ),
    UnmodelledMethod(
        "another optimizer than AdamW",
        ("muon", "lion", "adafactor", "shampoo", "soap", "sgd", "lamb", "adam8bit", "adamw8bit", "8bitadam", "sophia",
         "galore", "apollo"),
        "adamw, with --with bf16_moments for smaller states",
    ),
    UnmodelledMethod(
        "offloading parameters or whole layers to the host",
        ("offload", "cpuoffload", "cpuoffloading", "zerooffload", "paramoffload"),
        "--with activation_offload for activations, or --with optimizer_offload for optimizer states",
    ),
    UnmodelledMethod(
        "DualPipe", ("dualpipe", "dualpipev"), "--with expert_overlap of megatron, or schedule=zbv of torchtitan"
    ),
    UnmodelledMethod(
        "4-bit or 6-bit precision",
        ("fp4", "nvfp4", "mxfp4", "mxfp6", "int4"),
        "fp8-mxfp8 on Blackwell, or fp8-blockwise",
    ),
    UnmodelledMethod("8-bit integers", ("int8", "w8a8", "smoothquant"), "fp8-tensorwise"),
    UnmodelledMethod(
        "DeepSpeed", ("deepspeed", "zero3", "zeroinfinity", "megatrondeepspeed"), "fsdp1 for ZeRO-3, or megatron"
    ),
    UnmodelledMethod(
        "another framework",
        ("fsdp", "fsdp2", "accelerate", "transformers", "huggingface", "hf", "trl", "axolotl", "llamafactory",
         "unsloth", "nemo", "lightning", "maxtext", "jax", "colossalai", "nanotron", "gptneox", "xtuner", "verl"),
        "torchtitan for FSDP2, fsdp1 for FSDP1, megatron for NeMo",
    ),
    UnmodelledMethod(
        "reinforcement learning and preference training",
        ("rlhf", "grpo", "ppo", "dpo", "rl"),
        "the training step alone, as pre-training",
    ),
    UnmodelledMethod(
        "pruning and distillation",
        ("pruning", "prune", "sparsity", "distillation", "distill", "knowledgedistillation", "teacher"),
        "the student's training step alone, as pre-training",
    ),
    UnmodelledMethod("inference", ("inference", "vllm", "sglang", "serving", "decode", "kvcache"), "none"),
    UnmodelledMethod(
        "images and audio",
        ("vision", "vit", "multimodal", "vlm", "audio", "diffusion", "stablediffusion", "dit", "flux", "sdxl"),
        "the language model alone",
    ),
    UnmodelledMethod(
        "Mamba and linear attention",
        ("mamba", "mamba2", "rwkv", "retnet", "ssm", "linearattention", "deltanet", "gateddeltanet"),
        "a model of attention alone (mofa show workload counts both)",
    ),
    UnmodelledMethod(
        "TPUs and other chips than NVIDIA's and AMD's",
        ("tpu", "trainium", "trn1", "trn2", "gaudi", "gaudi2", "gaudi3", "ascend", "cerebras"),
        "a GPU file with its peaks and bandwidths (mofa new gpu)",
    ),
    UnmodelledMethod(
        "packed sequences and batches that grow",
        ("packing", "sequencepacking", "varlen", "rampup", "rampupbatchsize"),
        "one sequence length and one global batch",
    ),
)  # fmt: skip

OTHER_NAMES = {
    "micro_batch": ("mbs", "microbatch", "microbatchsize", "localbatchsize", "mb", "batchsize",
                    "perdevicetrainbatchsize"),
    "tp": ("tpsize", "tpdegree", "tensorparallel", "tensorparallelism", "tensormodelparallelsize",
           "tensorparalleldegree"),
    "pp": ("ppsize", "ppdegree", "pipelineparallel", "pipelinemodelparallelsize", "pipelineparalleldegree", "stages",
           "pipeline"),
    "vpp": ("vppsize", "virtualpipelinemodelparallelsize", "virtualstages", "interleave"),
    "dp": ("dpsize", "dpdegree", "dataparallel", "dataparallelsize", "dataparalleldegree", "dpshard"),
    "cp": ("cpsize", "cpdegree", "contextparallel", "contextparallelsize", "contextparalleldegree"),
    "ep": ("epsize", "epdegree", "expertparallel", "expertmodelparallelsize", "expertparalleldegree"),
    "etp": ("etpsize", "experttensorparallelsize"),
    "sp": ("sequenceparallel", "sequenceparallelism"),
    "recompute": ("gradientcheckpointing", "activationcheckpointing", "checkpointing", "ac", "recomputegranularity",
                  "recomputation"),
    "zero": ("zerostage", "distributedoptimizer"),
    "dp_replicate": ("hsdp", "replicas"),
    "dispatcher": ("moetokendispatchertype",),
    "tp_overlap": ("tpcommoverlap",),
    "optimizer_offload": ("optimizercpuoffload", "optimizeroffloadfraction", "offloadfraction"),
    "activation_offload": ("finegrainedactivationoffloading", "offloadmodules", "activationoffloading"),
    "overlap_optimizer_copies": ("overlapcpuoptimizerd2hh2d",),
    "host_threads": ("ompnumthreads",),
    "expert_overlap": ("overlapmoeexpertparallelcomm", "moea2aoverlap"), "delay_wgrad": ("delaywgradcompute",),
    "shared_expert_overlap": ("moesharedexpertoverlap",),
    "cp_kind": ("cpcommtype", "ulysses"),
    "model": ("workload",), "hardware": ("cluster", "nodetype"), "gpus": ("numgpus", "ngpus", "worldsize"),
    "blocking": ("sync", "synchronous"), "async": ("asynchronous",),
    "megatron": ("megatronlm", "megatroncore", "mcore", "megatronbridge"),
    "torchtitan": ("titan",),
}  # fmt: skip
"""What other programs call a field or a framework, small and without dashes and underscores."""
ELSEWHERE = {
    "gbs": "--global-batch", "globalbatch": "--global-batch", "globalbatchsize": "--global-batch",
    "seqlen": "--seq-len", "seqlength": "--seq-len", "sequencelength": "--seq-len", "gpus": "--gpus",
    "numgpus": "--gpus", "ngpus": "--gpus", "worldsize": "--gpus", "n": "--gpus", "nnodes": "--nodes",
    "numnodes": "--nodes", "contextlength": "--seq-len", "sequencelen": "--seq-len", "maxseqlen": "--seq-len",
    "framework": "--framework", "tokens": "--tokens", "fp8": "--with fp8", "precision": "--with fp8",
    "bf16moments": "--with bf16_moments",
}  # fmt: skip
"""Words that are options of their own."""


def normalised_word(word: object) -> str:
    """A word without what people write differently.

    >>> normalised_word("Micro-Batch_size")
    'microbatchsize'
    """
    return str(word)[:100].casefold().replace("-", "").replace("_", "").replace(" ", "")


def why_not_modelled(word: object) -> str:
    """That a word's method is not modelled, and what is nearest; empty where the word is none of them.

    >>> why_not_modelled("lora_rank")
    'LoRA is not modelled; the nearest is training all weights, which takes more memory'
    >>> why_not_modelled("mamba2-2.7b").split(";")[0]
    'Mamba and linear attention are not modelled'
    >>> why_not_modelled("llama")
    ''
    """
    plain, first = normalised_word(word), normalised_word(re.split(r"[-_ /.]", str(word)[:100])[0])
    for method in NOT_MODELLED:
        if plain in method.words or first in method.words:
            nearest = "" if method.nearest == "none" else f"; the nearest is {method.nearest}"
            verb = "are" if " and " in method.name or method.name.endswith("s") else "is"
            return f"{method.name} {verb} not modelled{nearest}"
    return ""


def known_synonym(word: object, known: tuple[str, ...]) -> str:
    """The known word that people also write so; empty where none is.

    >>> known_synonym("mbs", ("tp", "micro_batch")), known_synonym("TP", ("tp",)), known_synonym("tp", ("pp",))
    ('micro_batch', 'tp', '')
    """
    plain = normalised_word(word)
    for name in known:
        if plain == normalised_word(name) or plain in OTHER_NAMES.get(name, ()):
            return name
    return ""


def nearly_synonyms(word: object, known: Iterable[str]) -> list[str]:
    """The known word of which people's other name was misspelt, if any.

    >>> nearly_synonyms("tensor_paralel", ["tp", "pp"]), nearly_synonyms("zzz", ["tp"])
    (['tp'], [])
    """
    names = {other: name for name in known for other in OTHER_NAMES.get(name, ())}
    return [names[other] for other in difflib.get_close_matches(normalised_word(word), names, n=1, cutoff=0.85)]
