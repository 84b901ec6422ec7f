"""cost of mofa."""
