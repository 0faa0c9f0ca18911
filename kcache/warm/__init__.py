"""What is compiled ahead of time: recordings of requests, and lists of kernels."""
