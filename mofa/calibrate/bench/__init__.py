"""The timing itself: the only place of calibration that imports torch. It needs torch, NumPy and nothing else."""
