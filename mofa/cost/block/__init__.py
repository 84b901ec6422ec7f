"""Seconds and bytes of one block of a model: its tapes on clocks, and what of their tensors is alive."""
