"""routing of mofa."""
