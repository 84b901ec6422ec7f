"""frameworks of mofa."""
