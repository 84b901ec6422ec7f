"""Hugging Face ``config.json`` files: which architectures are read, and how they become models."""

from __future__ import annotations

from mofa.specs.huggingface.reader import ReadConfig, model_from_config, read_config

__all__ = ["ReadConfig", "model_from_config", "read_config"]
