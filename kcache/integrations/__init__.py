"""Adapters: kcache as the cache of frameworks that have a hook for one, one module for each."""
