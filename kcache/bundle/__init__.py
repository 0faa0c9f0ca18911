"""Bundles: one file with many entries, which is read without unpacking it."""
