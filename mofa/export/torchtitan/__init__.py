"""Jobs as torchtitan's configuration, and such configuration read back.

Names, types and defaults are those of torchtitan 0.2.2 (PyPI): config/job_config.py, models/*/model/args.py and
models/moe/moe.py, and of 0.3.0 (PyPI): config/configs.py, trainer.py and models/*/__init__.py. In tables a setting is
``section.name``; what a model is made of is ``args.name``, of its experts ``args.moe_args.name``.
"""

VERSION = "0.2.2"
"""Whose TOML is written, and whose facts predictions rest on."""
EXPERIMENTAL_VERSION = "0.3.0"
"""Whose Python config is written."""
