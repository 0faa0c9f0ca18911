"""Read-only tiers: directories of caches, and bundles, which are read after the own cache."""
