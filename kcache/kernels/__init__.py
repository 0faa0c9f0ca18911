"""From the arguments of a call to a kernel: finds it in the cache, or compiles it."""
