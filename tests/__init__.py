"""Tests of mofa; folders mirror the package."""
