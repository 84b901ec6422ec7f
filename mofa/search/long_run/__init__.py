"""Searches over long runs: spare nodes, numbers of GPUs, and the facts to which results are sensitive."""
