"""Helpers without kernels or backends: locks, forks, kcache's files, units, CUDA driver."""
