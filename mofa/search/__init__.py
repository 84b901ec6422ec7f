"""search of mofa."""
