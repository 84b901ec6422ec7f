"""specs of mofa."""
