"""Failures, checkpoints and restarts of long runs: closed forms, their Monte Carlo twin, a ledger that closes."""
