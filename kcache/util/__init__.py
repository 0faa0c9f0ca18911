"""Knows nothing of caches: locks, forks, mounts, units, CUDA driver."""
