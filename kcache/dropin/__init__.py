"""NVRTC's interface, answered by kcache: programs hit the cache without a changed line."""
