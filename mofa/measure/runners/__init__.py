"""One process per rank: the only modules of mofa, besides the benchmarks of calibrate, that import torch."""
