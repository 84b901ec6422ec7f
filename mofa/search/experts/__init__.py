"""Searches for layers with experts: token chunks, replicas, and statistics of the routing load."""
