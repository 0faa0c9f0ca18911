"""Adapters: kcache as the cache of cuda.core and of Triton, and what both adapters use."""
