"""A training step on the clocks of all ranks."""
