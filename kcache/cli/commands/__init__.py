"""The commands; those that do much the same share a file."""
