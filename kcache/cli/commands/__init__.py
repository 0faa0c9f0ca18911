"""The commands, one in each file; few share the file of another."""
