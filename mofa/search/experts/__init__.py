"""Choices for layers of experts: token chunks, replicas, and what their routing load is like."""
