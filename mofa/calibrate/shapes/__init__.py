"""The shapes that are measured, by family: a grid to fit on, and held-out ones."""
