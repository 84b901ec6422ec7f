"""Mutated inputs of every kind, and random legal jobs with what must hold of them; see ``scripts/fuzz``."""
