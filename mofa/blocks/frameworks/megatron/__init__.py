"""Megatron-Core: a layer on Transformer Engine and on its local spec, a file a part."""
