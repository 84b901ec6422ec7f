"""Plans on fewer GPUs than the cluster has, where these are faster at the same global batch."""
