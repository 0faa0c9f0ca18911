"""One file for each command, with the name of the command."""
