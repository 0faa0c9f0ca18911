"""Daemons: processes that answer programs over a private socket, and how they are found."""
