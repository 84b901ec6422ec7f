"""Sweeps: every combination of models, machines, batches, failures and prices, each planned by itself."""
