"""What the commands do, without a terminal: explain, diagnose, verify, migrate, bundle."""
