"""Figures: one plot a file, with ``ax=None``, and the style that they share."""
