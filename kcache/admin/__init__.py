"""What the commands do, without a terminal: the state of a cache, verify, migrate, bundle, push."""
