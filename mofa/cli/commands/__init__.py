"""A command a file: each parses, calls one function and shows."""
