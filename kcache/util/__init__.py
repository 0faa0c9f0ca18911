"""Helpers without kernels or backends: locks, forks, our files, units, CUDA driver."""
