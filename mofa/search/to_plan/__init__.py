"""Turn a costed row into the plan that reports show."""
