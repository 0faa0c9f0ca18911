"""Helpers that know no kernels and no backends: locks, forks, safe paths, units, CUDA driver."""
