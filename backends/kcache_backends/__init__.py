"""The backends that come with kcache; `kcache/backend.py` finds them by name."""
