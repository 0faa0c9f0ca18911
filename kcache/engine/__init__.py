"""A bounded, checked cache over any backend, with its counts and locks; independent of kernels."""
