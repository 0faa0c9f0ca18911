"""Bundles: one file with many entries, which can be read without unpacking it."""
