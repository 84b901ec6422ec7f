"""Tests of mofa.report."""
