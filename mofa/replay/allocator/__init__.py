"""PyTorch's CUDA caching allocator, and a timeline of what was allocated."""
