"""Jobs as arguments of Megatron-LM's ``pretrain_gpt.py``, and such arguments read back.

Names, types and defaults of arguments are those of Megatron-LM at the tag core_v0.16.1, commit
55ac7082517c3878ae653c07c09c534b8aed49f6: megatron/training/arguments.py, training_config.py, resilience_config.py, and
the fields of megatron/core/transformer/transformer_config.py and megatron/core/model_parallel_config.py, of which
arguments.py makes arguments.
"""

COMMIT = "55ac7082517c3878ae653c07c09c534b8aed49f6"
"""Of Megatron-LM, tag core_v0.16.1."""
VERSION = "0.16.1"
"""Of Megatron-Core."""
