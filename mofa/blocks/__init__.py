"""blocks of mofa."""
