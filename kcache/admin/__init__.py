"""List, explain, diagnose, verify, migrate: without a terminal."""
