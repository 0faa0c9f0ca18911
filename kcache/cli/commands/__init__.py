"""The commands; those that share options or a way to print share a file."""
