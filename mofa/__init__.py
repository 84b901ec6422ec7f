"""mofa: plans the training of large language models."""
