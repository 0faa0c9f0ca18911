"""The inputs of compiles ahead of time: recorded requests, and lists of kernels."""
