"""Uneven routing of tokens to experts: what load the ranks get."""
