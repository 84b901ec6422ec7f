"""Measurements of a real device, and the facts that are fitted to them."""
