"""The commands: one file for each, or for several that do much the same."""
