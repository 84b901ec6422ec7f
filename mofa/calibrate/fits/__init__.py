"""From measured rows to the facts of a profile."""
