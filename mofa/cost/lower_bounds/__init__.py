"""Lower bounds of what candidates cost: cheap for a whole table, and never above what :mod:`mofa.cost` says."""
