"""cli of mofa."""
