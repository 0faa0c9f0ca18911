"""One module for each chapter of the benchmarks: what it measures, and against what."""
