"""report of mofa."""
