"""Seconds of one op: kernels, collectives, where their groups lie, which kernel a library chooses."""
