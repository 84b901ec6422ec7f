"""Failures: their rates, out of components or records, and when they strike."""
