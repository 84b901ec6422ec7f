"""Jobs as recipes of Megatron-Bridge 0.3.1 (PyPI): what Megatron-LM's arguments say, as overrides of a ConfigContainer.

Fields are those of training/config.py, training/mixed_precision.py, models/gpt_provider.py and mla_provider.py, and of
the Megatron-Core classes that these inherit.
"""

VERSION = "0.3.1"
"""Of Megatron-Bridge."""
