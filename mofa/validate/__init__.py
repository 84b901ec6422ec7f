"""Predicted against measured: real training runs, our own and published ones, and how far predictions are off."""

from mofa.validate.all_runs import validate_runs
from mofa.validate.validation_report import ValidationReport

__all__ = ["ValidationReport", "validate_runs"]
