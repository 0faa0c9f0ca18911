"""The page that `kcache report` writes: HTML about a cache."""
