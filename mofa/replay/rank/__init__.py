"""What each rank of a plan holds and does, as programs of allocations."""
