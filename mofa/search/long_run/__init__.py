"""Searches over long runs: spare nodes, numbers of GPUs, and what moves the result."""
