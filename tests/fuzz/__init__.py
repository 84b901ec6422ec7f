"""Mutated inputs of every kind, and random legal jobs with what must hold of them; ``scripts/fuzz`` runs it for hours."""
