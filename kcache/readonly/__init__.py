"""Read-only tiers: cache directories and bundles, which are read after the user's own cache."""
