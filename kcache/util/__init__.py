"""Helpers that know no kernels and no backends: locks, forks, our files, units, CUDA driver."""
