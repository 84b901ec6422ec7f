"""What a run with failures expects, in closed form: intervals between checkpoints, ETTR, several levels."""
