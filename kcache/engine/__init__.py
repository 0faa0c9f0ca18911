"""A bounded, counted, checked cache; knows no kernels and no files."""
