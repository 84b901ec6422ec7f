"""A rank's training steps played through the allocator."""
