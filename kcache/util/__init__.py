"""Helpers that know no kernels and no backends: locks, forks, trusted files, units, hints, CUDA driver."""
