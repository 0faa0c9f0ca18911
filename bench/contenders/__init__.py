"""kcache and the caches that it is compared with, behind one interface."""
