"""From arguments to a kernel: find it, or have it compiled."""
