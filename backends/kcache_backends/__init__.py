"""The backends that come with kcache; `kcache.registry` finds them by name."""
