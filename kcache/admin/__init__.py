"""What the commands do, without a terminal: explain, verify, migrate, bundle, push."""
