"""Seconds of a step from seconds of blocks: micro-batches, pipelines, data parallelism."""
