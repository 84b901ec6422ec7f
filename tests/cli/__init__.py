"""Tests of mofa.cli."""
