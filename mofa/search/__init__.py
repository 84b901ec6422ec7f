"""The search: list strategies, drop illegal ones, cost the rest, rank, and re-rank the best by replay."""
