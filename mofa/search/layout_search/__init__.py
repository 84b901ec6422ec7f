"""Search for the layout of a pipeline with which a strategy's step is shortest, by CP-SAT with a lower bound."""
